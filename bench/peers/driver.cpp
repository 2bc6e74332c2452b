// The bare driver: cuMemAllocAsync and cuMemFreeAsync on the device's default pool, which keeps its memory until the row ends
// (maximum release threshold).

#include <cuda.h>

#include <stdexcept>

#include "serve.hpp"

namespace {

void require(CUresult status, char const* call)
{
  if (status != CUDA_SUCCESS) {
    char const* text = nullptr;
    cuGetErrorString(status, &text);
    throw std::runtime_error(std::string{call} + ": " + (text != nullptr ? text : "unknown error"));
  }
}

class Driver {
 public:
  using Stream = CUstream;

  Driver(CUdevice device, CUcontext context) : device_{device}, context_{context}
  {
    require(cuDeviceGetDefaultMemPool(&pool_, device_), "cuDeviceGetDefaultMemPool");
    cuuint64_t threshold = ~cuuint64_t{0};
    require(cuMemPoolSetAttribute(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold), "cuMemPoolSetAttribute");
  }

  Driver(Driver const&)            = delete;
  Driver& operator=(Driver const&) = delete;

  ~Driver()
  {
    cuCtxSynchronize();
    for (CUstream stream : streams_) { cuStreamDestroy(stream); }
    cuMemPoolTrimTo(pool_, 0);
  }

  Stream stream()
  {
    CUstream stream = nullptr;
    require(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    streams_.push_back(stream);
    return stream;
  }

  void enter_thread() { cuCtxSetCurrent(context_); }

  void* allocate(std::size_t bytes, Stream stream)
  {
    CUdeviceptr block = 0;
    if (cuMemAllocAsync(&block, bytes, stream) != CUDA_SUCCESS) { return nullptr; }
    return reinterpret_cast<void*>(block);
  }

  void free(void* block, std::size_t, Stream stream) { cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(block), stream); }

  // The driver frees natively on another stream.
  void free_elsewhere(void* block, std::size_t bytes, Stream, Stream used, peers::Device const&) { free(block, bytes, used); }

  void* raw(Stream stream) { return stream; }

  void synchronize() { cuCtxSynchronize(); }

  bool holds_what_it_needs() { return true; }

 private:
  CUdevice device_;
  CUcontext context_;
  CUmemoryPool pool_ = nullptr;
  std::vector<CUstream> streams_;
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  CUdevice device    = 0;
  CUcontext context  = nullptr;
  try {
    require(cuInit(0), "cuInit");
    require(cuDeviceGet(&device, 0), "cuDeviceGet");
    require(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    require(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  } catch (std::exception const& error) {
    std::fprintf(stderr, "driver: no device: %s\n", error.what());
    return 1;
  }
  try {
    peers::Device const cuda{options.ptx};
    return peers::serve(options, "driver", &cuda, [&](std::string const& variant, bool) {
      if (variant != "async") { peers::unknown_variant(variant); }
      return std::make_unique<Driver>(device, context);
    });
  } catch (std::exception const& error) {
    std::fprintf(stderr, "driver: %s\n", error.what());
    return 1;
  }
}
