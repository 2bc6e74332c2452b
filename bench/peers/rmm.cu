// RMM's memory resources through their C++ interface: pool, arena, binning (over a pool), async and cuda.
//
// The resources are held by RMM's type-erased owner, as its users hold them. Pools start with half of the free memory, so that none
// grows during a measurement, or with 32 MiB if the memory they take is measured.

#include <cuda_runtime_api.h>

#include <rmm/cuda_device.hpp>
#include <rmm/cuda_stream.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/resource_ref.hpp>

#include <cuda/stream_ref>

#include "serve.hpp"

namespace {

using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;

Resource resource(std::string const& variant, bool grows)
{
  rmm::mr::cuda_memory_resource upstream;
  if (variant == "cuda") { return upstream; }
  if (variant == "async") { return rmm::mr::cuda_async_memory_resource{}; }
  std::size_t const half  = rmm::percent_of_free_device_memory(50);
  std::size_t const start = grows ? std::size_t{32} << 20 : half;
  if (variant == "arena") { return rmm::mr::arena_memory_resource{upstream, half}; }
  if (variant == "pool") { return rmm::mr::pool_memory_resource{upstream, start}; }
  if (variant != "binning") { peers::unknown_variant(variant); }
  // Bins of 256 KiB to 4 MiB, the example in RMM's documentation.
  return rmm::mr::binning_memory_resource{rmm::mr::pool_memory_resource{upstream, start}, 18, 22};
}

class Rmm {
 public:
  using Stream = cuda::stream_ref;

  Rmm(std::string const& variant, bool grows) : resource_{resource(variant, grows)}, is_arena_{variant == "arena"} {}

  Stream stream()
  {
    streams_.push_back(std::make_unique<rmm::cuda_stream>());
    return *streams_.back();
  }

  void enter_thread() { cudaSetDevice(0); }

  void* allocate(std::size_t bytes, Stream stream)
  {
    try {
      return resource_.allocate(stream, bytes, 256);
    } catch (std::bad_alloc const&) {
      return nullptr;
    }
  }

  void free(void* block, std::size_t bytes, Stream stream) { resource_.deallocate(stream, block, bytes, 256); }

  // RMM frees natively on another stream.
  void free_elsewhere(void* block, std::size_t bytes, Stream, Stream used, peers::Device const&) { free(block, bytes, used); }

  void* raw(Stream stream) { return stream.get(); }

  void synchronize() { cudaDeviceSynchronize(); }

  // An arena takes its whole size at the start.
  bool holds_what_it_needs() { return !is_arena_; }

 private:
  // Declared first, so that streams outlive the resource that remembers them.
  std::vector<std::unique_ptr<rmm::cuda_stream>> streams_;
  Resource resource_;
  bool is_arena_;
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  if (auto const status = cudaFree(nullptr); status != cudaSuccess) {
    std::fprintf(stderr, "rmm: no device: %s\n", cudaGetErrorString(status));
    return 1;
  }
  try {
    peers::Device const cuda{options.ptx};
    return peers::serve(options, "rmm", &cuda, [](std::string const& variant, bool grows) {
      return std::make_unique<Rmm>(variant, grows);
    });
  } catch (std::exception const& error) {
    std::fprintf(stderr, "rmm: %s\n", error.what());
    return 1;
  }
}
