// PyTorch's caching allocator from C++, without tensors. It exists once per process: every row starts with an empty cache.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "serve.hpp"

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

class Torch {
 public:
  using Stream = cudaStream_t;

  Torch() = default;

  Torch(Torch const&)            = delete;
  Torch& operator=(Torch const&) = delete;

  ~Torch()
  {
    cudaDeviceSynchronize();
    caching::emptyCache();
  }

  // PyTorch returns 32 streams round robin and keeps them, so 16 threads have 16 different ones.
  Stream stream() { return c10::cuda::getStreamFromPool(false, 0).stream(); }

  void enter_thread() { cudaSetDevice(0); }

  void* allocate(std::size_t bytes, Stream stream)
  {
    try {
      return caching::raw_alloc_with_stream(bytes, stream);
    } catch (c10::Error const&) {
      return nullptr;
    }
  }

  void free(void* block, std::size_t, Stream) { caching::raw_delete(block); }

  // A raw block returns to the stream of its allocation, which first waits for the other one.
  void free_elsewhere(void* block, std::size_t bytes, Stream allocated, Stream used, peers::Device const& device)
  {
    device.order(used, allocated);
    free(block, bytes, allocated);
  }

  void* raw(Stream stream) { return stream; }

  void synchronize() { cudaDeviceSynchronize(); }

  bool holds_what_it_needs() { return true; }
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  if (auto const status = cudaFree(nullptr); status != cudaSuccess) {
    std::fprintf(stderr, "torch: no device: %s\n", cudaGetErrorString(status));
    return 1;
  }
  caching::init(1);
  try {
    peers::Device const cuda{options.ptx};
    return peers::serve(options, "torch", &cuda, [](std::string const& variant, bool) {
      if (variant != "cpp") { peers::unknown_variant(variant); }
      return std::make_unique<Torch>();
    });
  } catch (std::exception const& error) {
    std::fprintf(stderr, "torch: %s\n", error.what());
    return 1;
  }
}
