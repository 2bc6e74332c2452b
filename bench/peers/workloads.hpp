// The workloads that need nothing but an allocator. docs/benchmarks.md defines them.
//
// A peer is a class with
//     using Stream = ...;                             a cheap handle
//     Stream stream();                                another stream, owned by the peer
//     void* raw(Stream);                              the driver's name for it
//     void enter_thread();                            called first by every new thread
//     void* allocate(std::size_t bytes, Stream);      null when there is no memory
//     void free(void*, std::size_t bytes, Stream);    the stream of the allocation
//     void free_elsewhere(void*, std::size_t bytes, Stream allocated, Stream used, Device const&);
//     void synchronize();                             the device is idle afterwards
//     bool holds_what_it_needs();                     false for an allocator that takes all of its memory at the start
// Every row gets a new one from `make(grows)`, so that no row inherits the holes of another. Where `grows`, it starts with
// little memory and takes what it needs; otherwise it may start with as much as it likes.

#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <thread>

#include "generators.hpp"
#include "measure.hpp"

namespace peers {

template <class Make>
void pair(Rows const& rows, Make const& make)
{
  auto peer = make(false);
  print(rows, measure_pairs(*peer, peer->stream(), rows.request().parameter, rows.options().seconds));
}

/// 1 KiB pairs among blocks of `size`: `count` of them, of which every second one is freed where `with_holes`.
template <class Make>
void among(Rows const& rows, std::size_t count, std::size_t size, bool with_holes, Make const& make)
{
  auto peer   = make(false);
  auto stream = peer->stream();
  std::vector<void*> blocks;
  blocks.reserve(count);
  // Making the holes is the slow part for a linear free list and is not measured.
  std::size_t const all = count + (with_holes ? (count + 1) / 2 : 0);
  Stopwatch watch;
  std::string trouble;
  while (blocks.size() < count && trouble.empty()) {
    void* block = peer->allocate(size, stream);
    if (block == nullptr) {
      trouble = "an allocation failed";
    } else {
      blocks.push_back(block);
      if (watch.seconds() > limits::filling) { trouble = given_up(limits::filling, blocks.size(), all); }
    }
  }
  for (std::size_t at = 0; with_holes && at < blocks.size() && trouble.empty(); at += 2) {
    peer->free(blocks[at], size, stream);
    blocks[at] = nullptr;
    if (watch.seconds() > limits::filling) { trouble = given_up(limits::filling, count + at / 2 + 1, all); }
  }
  peer->synchronize();
  if (trouble.empty()) {
    print(rows, measure_pairs(*peer, stream, 1024, rows.options().seconds));
  } else {
    rows.skipped(trouble);
  }
  for (void* block : blocks) {
    if (block != nullptr) { peer->free(block, size, stream); }
  }
  peer->synchronize();
}

/// Threads with 64 slots each, and a stream each or one for all; a step picks a slot and fills or empties it. Each thread makes a million steps, or as
/// many as it can until the clock stops all of them.
template <class Make>
void threads(Rows const& rows, bool shares_a_stream, Make const& make)
{
  constexpr std::size_t steps = 1000000;
  std::size_t const count     = rows.request().parameter;
  if (count > 2 * std::max(1U, std::thread::hardware_concurrency())) { return rows.skipped("more than two threads for each core"); }
  auto peer                   = make(false);
  auto const shared           = peer->stream();
  double const limit          = rows.options().seconds / 2;
  std::atomic<std::size_t> ready{0};
  std::atomic<bool> go{false};
  std::atomic<std::size_t> done{0};
  std::atomic<bool> failed{false};
  std::vector<double> ends(count);
  std::optional<Stopwatch> watch;
  std::vector<std::thread> workers;
  for (std::size_t thread = 0; thread < count; ++thread) {
    workers.emplace_back([&, thread, stream = shares_a_stream ? shared : peer->stream()] {
      peer->enter_thread();
      struct Slot {
        void* address;
        std::size_t bytes;
      };
      Slot slots[64] = {};
      Xorshift random{0x9e3779b9 + thread};
      auto work = [&](std::size_t most, double seconds) {
        Stopwatch own;
        for (std::size_t step = 0; step < most; ++step) {
          if (step % 256 == 255 && own.seconds() > seconds) { return step; }
          Slot& slot = slots[random.below(64)];
          if (slot.address != nullptr) {
            peer->free(slot.address, slot.bytes, stream);
            slot.address = nullptr;
          } else {
            slot.bytes   = 1 + random.below(mib);
            slot.address = peer->allocate(slot.bytes, stream);
            if (slot.address == nullptr) { failed = true; }
          }
        }
        return most;
      };
      // A peer that throws must neither end the program nor keep the others waiting.
      auto guarded = [&](auto const& part) {
        try {
          part();
        } catch (std::exception const& error) {
          failed = true;
          rows.note(error.what());
        }
      };
      guarded([&] { work(steps / 10, limit / 2); });
      ++ready;
      while (!go) { std::this_thread::yield(); }
      guarded([&] { done += work(steps, limit); });
      ends[thread] = watch->seconds();
      guarded([&] {
        for (Slot const& slot : slots) {
          if (slot.address != nullptr) { peer->free(slot.address, slot.bytes, stream); }
        }
      });
    });
  }
  while (ready < count) { std::this_thread::yield(); }
  watch.emplace();
  go = true;
  for (auto& worker : workers) { worker.join(); }
  peer->synchronize();
  if (failed) { return rows.skipped("an allocation failed"); }
  double const seconds = *std::max_element(ends.begin(), ends.end());
  rows.value(static_cast<double>(done) / seconds / 1e6, "Mops/s");
}

}  // namespace peers
