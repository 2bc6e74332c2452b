// RMM's memory resources through their ordinary C++ interface: pool, arena, binning (over a pool), async and cuda.
//
// The resources are held as RMM's users hold them, behind its type-erased owner. Pools start with half of the free memory, so
// that none of them grows while it is measured.

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

#include "workloads.hpp"

namespace {

using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;

Resource resource(std::string const& variant)
{
  rmm::mr::cuda_memory_resource upstream;
  if (variant == "cuda") { return upstream; }
  if (variant == "async") { return rmm::mr::cuda_async_memory_resource{}; }
  std::size_t const half = rmm::percent_of_free_device_memory(50);
  if (variant == "arena") { return rmm::mr::arena_memory_resource{upstream, half}; }
  if (variant == "pool") { return rmm::mr::pool_memory_resource{upstream, half}; }
  // Bins of 256 KiB to 4 MiB, the example in RMM's own documentation.
  return rmm::mr::binning_memory_resource{rmm::mr::pool_memory_resource{upstream, half}, 18, 22};
}

class Rmm {
 public:
  using Stream = cuda::stream_ref;

  explicit Rmm(std::string const& variant) : resource_{resource(variant)} {}

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

  void synchronize() { cudaDeviceSynchronize(); }

  std::uint64_t total_bytes()
  {
    std::size_t free  = 0;
    std::size_t total = 0;
    cudaMemGetInfo(&free, &total);
    return total;
  }

 private:
  // Declared first: streams outlive the resource that remembers them.
  std::vector<std::unique_ptr<rmm::cuda_stream>> streams_;
  Resource resource_;
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  if (auto const status = cudaFree(nullptr); status != cudaSuccess) {
    std::fprintf(stderr, "rmm: no device: %s\n", cudaGetErrorString(status));
    return 1;
  }
  for (std::string const variant : {"pool", "arena", "binning", "async", "cuda"}) {
    peers::run(options, "rmm", variant, [&] { return std::make_unique<Rmm>(variant); });
  }
}
