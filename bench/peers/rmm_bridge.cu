// RMM's memory resources through C functions, for programs that are not C++. Built on a GPU host into librmm_bridge.so:
//
//     nvcc -shared -Xcompiler -fPIC -std=c++20 ... rmm_bridge.cu -lrmm -lrapids_logger -o librmm_bridge.so
//
// Functions:
//   xlog_rmm_version     returns the version of this interface, 1
//   xlog_rmm_open        opens a resource on a device, or returns null with a message; pool and binning start with `initial` bytes,
//                        an arena never has more
//   xlog_rmm_close       closes a resource, which must not be used afterwards
//   xlog_rmm_allocate    returns 0 and an address aligned to 256 bytes; 1 if there is no memory; 2 for any other failure
//   xlog_rmm_deallocate  returns 0, or 2 on failure; the size is that of the allocation
// Streams are driver streams of that device. Messages are NUL-terminated and truncated to their buffer. Threads may call
// concurrently. No exception leaves the bridge.

#include <cuda_runtime_api.h>

#include <rmm/cuda_device.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/resource_ref.hpp>

#include <cuda/stream_ref>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace {

using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;

constexpr std::size_t alignment = 256;

Resource make(std::string const& kind, std::size_t initial)
{
  rmm::mr::cuda_memory_resource upstream;
  if (kind == "cuda") { return upstream; }
  if (kind == "async") { return rmm::mr::cuda_async_memory_resource{}; }
  if (kind == "arena") { return rmm::mr::arena_memory_resource{upstream, initial}; }
  if (kind == "pool") { return rmm::mr::pool_memory_resource{upstream, initial}; }
  if (kind != "binning") { throw std::invalid_argument("there is no resource '" + kind + "'"); }
  return rmm::mr::binning_memory_resource{rmm::mr::pool_memory_resource{upstream, initial}, 18, 22};
}

struct Opened {
  rmm::cuda_device_id device;
  Resource resource;
};

void say(char const* text, char* message, std::size_t room)
{
  if (room > 0) { std::snprintf(message, room, "%s", text); }
}

/// Runs `work` on the device and converts its exception to a status.
template <class Work>
int guarded(void* resource, char* message, std::size_t room, Work const& work)
{
  auto& opened = *static_cast<Opened*>(resource);
  try {
    rmm::cuda_set_device_raii const current{opened.device};
    work(opened.resource);
    return 0;
  } catch (std::bad_alloc const& error) {
    say(error.what(), message, room);
    return 1;
  } catch (std::exception const& error) {
    say(error.what(), message, room);
  } catch (...) {
    say("something that is no exception was thrown", message, room);
  }
  return 2;
}

}  // namespace

extern "C" {

std::uint32_t xlog_rmm_version() { return 1; }

void* xlog_rmm_open(char const* kind, std::uint32_t ordinal, std::size_t initial, char* message, std::size_t room)
{
  try {
    rmm::cuda_device_id const device{static_cast<int>(ordinal)};
    rmm::cuda_set_device_raii const current{device};
    return new Opened{device, make(kind, initial / alignment * alignment)};
  } catch (std::exception const& error) {
    say(error.what(), message, room);
  } catch (...) {
    say("something that is no exception was thrown", message, room);
  }
  return nullptr;
}

void xlog_rmm_close(void* resource)
{
  auto* opened = static_cast<Opened*>(resource);
  try {
    rmm::cuda_set_device_raii const current{opened->device};
    cudaDeviceSynchronize();
    delete opened;
  } catch (...) {
    std::fprintf(stderr, "rmm bridge: a resource could not be closed\n");
  }
}

int xlog_rmm_allocate(
  void* resource, std::size_t bytes, void* stream, std::uint64_t* ptr, char* message, std::size_t room)
{
  return guarded(resource, message, room, [&](Resource& memory) {
    cuda::stream_ref const on{static_cast<cudaStream_t>(stream)};
    *ptr = reinterpret_cast<std::uint64_t>(memory.allocate(on, bytes, alignment));
  });
}

int xlog_rmm_deallocate(
  void* resource, std::uint64_t ptr, std::size_t bytes, void* stream, char* message, std::size_t room)
{
  return guarded(resource, message, room, [&](Resource& memory) {
    cuda::stream_ref const on{static_cast<cudaStream_t>(stream)};
    memory.deallocate(on, reinterpret_cast<void*>(ptr), bytes, alignment);
  });
}

}  // extern "C"
