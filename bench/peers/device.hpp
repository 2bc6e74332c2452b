// The GPU's driver, loaded at run time, so that every peer uses the same kernel, events and memory counters, however it was built.

#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace peers {

/// The driver functions that workloads need beside the measured allocator. They work in the context that is current at construction.
class Device {
 public:
  Device(Device const&)            = delete;
  Device& operator=(Device const&) = delete;

  explicit Device(std::string const& ptx)
  {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) { throw std::runtime_error("no libcuda.so.1"); }
    load(library, memory_info_, "cuMemGetInfo_v2");
    load(library, create_, "cuEventCreate");
    load(library, record_, "cuEventRecord");
    load(library, wait_, "cuStreamWaitEvent");
    load(library, current_, "cuCtxGetCurrent");
    load(library, make_current_, "cuCtxSetCurrent");
    load(library, load_module_, "cuModuleLoadData");
    load(library, function_, "cuModuleGetFunction");
    load(library, launch_, "cuLaunchKernel");
    require(current_(&context_), "cuCtxGetCurrent");
    if (context_ == nullptr) { throw std::runtime_error("no context is current"); }
    if (!ptx.empty()) {
      std::ifstream file{ptx, std::ios::binary};
      if (!file) { throw std::runtime_error("no file " + ptx); }
      std::string const image{std::istreambuf_iterator<char>{file}, {}};
      void* module = nullptr;
      require(load_module_(&module, image.c_str()), "cuModuleLoadData");
      require(function_(&spin_, module, "spin"), "cuModuleGetFunction");
    }
  }

  [[nodiscard]] bool has_kernel() const { return spin_ != nullptr; }

  /// Returns the used bytes of the device, by any process.
  [[nodiscard]] std::uint64_t taken() const
  {
    std::size_t free  = 0;
    std::size_t total = 0;
    require(memory_info_(&free, &total), "cuMemGetInfo");
    return total - free;
  }

  [[nodiscard]] std::uint64_t total() const
  {
    std::size_t free  = 0;
    std::size_t total = 0;
    require(memory_info_(&free, &total), "cuMemGetInfo");
    return total;
  }

  /// Orders later work on `then` after all work queued so far on `first`. Each thread has one event: a wait refers to the event's
  /// record at the time of the wait.
  void order(void* first, void* then) const
  {
    thread_local void* event = nullptr;
    if (event == nullptr) {
      require(make_current_(context_), "cuCtxSetCurrent");
      constexpr unsigned disable_timing = 2;
      require(create_(&event, disable_timing), "cuEventCreate");
    }
    require(record_(event, first), "cuEventRecord");
    require(wait_(then, event, 0), "cuStreamWaitEvent");
  }

  /// Queues one thread that spins for `ticks` of the GPU's clock and then stores `value` at `out`.
  void spin(void* stream, std::uint64_t ticks, void* out, std::uint32_t value) const
  {
    void* arguments[] = {&ticks, &out, &value};
    require(launch_(spin_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
  }

 private:
  template <class Function>
  static void load(void* library, Function& function, char const* name)
  {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) { throw std::runtime_error(std::string{"libcuda.so.1 has no "} + name); }
  }

  static void require(int status, char const* call)
  {
    if (status != 0) { throw std::runtime_error(std::string{call} + ": error " + std::to_string(status)); }
  }

  int (*memory_info_)(std::size_t*, std::size_t*) = nullptr;
  int (*create_)(void**, unsigned)                = nullptr;
  int (*record_)(void*, void*)                    = nullptr;
  int (*wait_)(void*, void*, unsigned)            = nullptr;
  int (*current_)(void**)                         = nullptr;
  int (*make_current_)(void*)                     = nullptr;
  int (*load_module_)(void**, void const*)        = nullptr;
  int (*function_)(void**, void*, char const*)    = nullptr;
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;
  void* context_ = nullptr;
  void* spin_    = nullptr;
};

}  // namespace peers
