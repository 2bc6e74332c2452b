// Several streams: blocks handed from one to another, and kernels on all of them.

#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <thread>

#include "device.hpp"
#include "generators.hpp"
#include "measure.hpp"

namespace peers {

/// A single-producer, single-consumer ring.
template <class Item, std::size_t Places>
class Ring {
 public:
  void put(Item const& item)
  {
    std::size_t const at = put_.load(std::memory_order_relaxed);
    while (at - taken_.load(std::memory_order_acquire) == Places) { std::this_thread::yield(); }
    items_[at % Places] = item;
    put_.store(at + 1, std::memory_order_release);
  }

  Item take()
  {
    std::size_t const at = taken_.load(std::memory_order_relaxed);
    while (put_.load(std::memory_order_acquire) == at) { std::this_thread::yield(); }
    Item const item = items_[at % Places];
    taken_.store(at + 1, std::memory_order_release);
    return item;
  }

 private:
  alignas(64) std::atomic<std::size_t> put_{0};
  alignas(64) std::atomic<std::size_t> taken_{0};
  alignas(64) Item items_[Places] = {};
};

/// One thread allocates on a stream; another frees the blocks on a second stream. Blocks have 1 byte to `parameter` MiB, and the
/// streams are ordered once per block.
template <class Make>
void handoff(Rows const& rows, Device const* device, Make const& make)
{
  if (device == nullptr) { return rows.skipped("host memory has no streams"); }
  struct Item {
    void* address     = nullptr;
    std::size_t bytes = 0;
  };
  constexpr std::size_t most  = 200000;
  std::size_t const max_bytes = rows.request().parameter * mib;
  double const limit          = rows.options().seconds;
  auto peer                   = make(false);
  auto const from             = peer->stream();
  auto const to               = peer->stream();
  auto ring                   = std::make_unique<Ring<Item, 64>>();
  std::atomic<bool> failed{false};
  std::string trouble;
  std::size_t moved = 0;
  double seconds    = 0;
  std::thread consumer{[&] {
    peer->enter_thread();
    for (Item item = ring->take(); item.bytes != 0; item = ring->take()) {
      try {
        device->order(peer->raw(from), peer->raw(to));
        peer->free_elsewhere(item.address, item.bytes, from, to, *device);
      } catch (std::exception const& error) {
        if (!failed.exchange(true)) { trouble = error.what(); }
      }
    }
  }};
  Xorshift random{7};
  // The first tenth warms up.
  for (bool warm : {false, true}) {
    Stopwatch watch;
    std::size_t const count = warm ? most : most / 10;
    for (moved = 0; moved < count && !failed; ++moved) {
      if (moved % 256 == 255 && watch.seconds() > limit) { break; }
      std::size_t const bytes = 1 + random.below(max_bytes);
      void* block             = nullptr;
      try {
        block = peer->allocate(bytes, from);
      } catch (std::exception const&) {
      }
      if (block == nullptr) { failed = true; }
      if (block != nullptr) { ring->put({block, bytes}); }
    }
    seconds = watch.seconds();
  }
  ring->put({nullptr, 0});
  consumer.join();
  peer->synchronize();
  if (failed) { return rows.skipped(trouble.empty() ? "an allocation failed" : trouble); }
  rows.value(static_cast<double>(moved) / seconds / 1e6, "Mops/s");
}

/// Four kernels on `parameter` streams, each with an 8-byte block that is allocated before and freed after it is queued. Warm streams
/// have already used the allocator. The figure is the median of 15 rounds, each with a new allocator.
template <class Make>
void kernels(Rows const& rows, bool is_warm, Device const* device, Make const& make)
{
  if (device == nullptr || !device->has_kernel()) { return rows.skipped("no kernel was given"); }
  constexpr std::uint64_t ticks = 1000000;
  std::size_t const count       = rows.request().parameter;
  std::vector<double> times;
  Stopwatch all;
  while (times.size() < 16 && (times.size() < 4 || all.seconds() < 5 * rows.options().seconds)) {
    auto peer = make(false);
    std::vector<decltype(peer->stream())> streams;
    for (std::size_t at = 0; at < count; ++at) { streams.push_back(peer->stream()); }
    if (is_warm) {
      for (auto const& stream : streams) {
        void* block = peer->allocate(8, stream);
        if (block == nullptr) { return rows.skipped("an allocation failed"); }
        peer->free(block, 8, stream);
      }
    }
    peer->synchronize();
    Stopwatch watch;
    for (std::size_t kernel = 0; kernel < 4; ++kernel) {
      auto const stream = streams[kernel % count];
      void* block       = peer->allocate(8, stream);
      if (block == nullptr) { return rows.skipped("an allocation failed"); }
      device->spin(peer->raw(stream), ticks, block, 1);
      peer->free(block, 8, stream);
    }
    peer->synchronize();
    times.push_back(watch.seconds() * 1e6);
  }
  // The first round loads the kernel and wakes the GPU.
  times.erase(times.begin());
  std::sort(times.begin(), times.end());
  rows.value(times[times.size() / 2], "us");
}

}  // namespace peers
