// The workloads, once for every peer that is written in C++. docs/benchmarks.md defines them.
//
// A peer is a class with
//     using Stream = ...;                             a cheap handle
//     Stream stream();                                another stream, owned by the peer
//     void enter_thread();                            called first by every new thread
//     void* allocate(std::size_t bytes, Stream);      null when there is no memory
//     void free(void*, std::size_t bytes, Stream);
//     void synchronize();                             the device is idle afterwards
//     std::uint64_t total_bytes();                    of the device
// Every row gets a new one from `make`, so that no row inherits the holes of another.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "generators.hpp"
#include "options.hpp"

namespace peers {

inline constexpr std::size_t mib = std::size_t{1} << 20;

inline std::string text(double seconds)
{
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", seconds);
  return digits;
}

class Stopwatch {
 public:
  [[nodiscard]] double seconds() const
  {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Keeps the compiler from seeing where a value comes from and whether it is used.
template <class Value>
inline void opaque(Value& value)
{
  asm volatile("" : "+r"(value) : : "memory");
}

struct Figures {
  double median;
  double best;
  std::size_t batches;
};

inline constexpr std::size_t per_batch = 1000;
inline constexpr std::size_t batches   = 101;

/// The time of one allocate and free of `bytes` in nanoseconds, over 101 batches of 1000 after 10 that do not count; fewer, but at
/// least 3, when `seconds` have passed. Nothing when an allocation fails.
template <class Peer>
std::optional<Figures> measure_pairs(Peer& peer, typename Peer::Stream stream, std::size_t bytes, double seconds)
{
  bool failed = false;
  auto batch  = [&] {
    Stopwatch watch;
    for (std::size_t pair = 0; pair < per_batch; ++pair) {
      opaque(bytes);
      void* block = peer.allocate(bytes, stream);
      opaque(block);
      if (block == nullptr) {
        failed = true;
        break;
      }
      peer.free(block, bytes, stream);
    }
    return watch.seconds() * 1e9 / per_batch;
  };
  Stopwatch warming;
  for (int turn = 0; turn < 10 && !failed && (turn == 0 || warming.seconds() < seconds / 4); ++turn) { batch(); }
  std::vector<double> times;
  Stopwatch watch;
  while (!failed && times.size() < batches && (times.size() < 3 || watch.seconds() < seconds)) { times.push_back(batch()); }
  peer.synchronize();
  if (failed) { return std::nullopt; }
  std::sort(times.begin(), times.end());
  return Figures{times[times.size() / 2], times.front(), times.size()};
}

inline void print(Rows const& rows, std::string const& workload, std::size_t parameter, std::optional<Figures> const& figures)
{
  if (!figures) { return rows.skipped(workload, parameter, "an allocation failed"); }
  if (figures->batches < batches) { rows.note("stopped by the clock after " + std::to_string(figures->batches) + " batches"); }
  rows.value(workload, parameter, figures->median, "ns");
  rows.value(workload + "-best", parameter, figures->best, "ns");
}

template <class Make>
void pair(Rows const& rows, std::size_t bytes, Make const& make)
{
  auto peer = make();
  print(rows, "pair", bytes, measure_pairs(*peer, peer->stream(), bytes, rows.options().seconds));
}

/// 1 KiB pairs while `count` holes of 4 KiB lie between blocks of 4 KiB.
template <class Make>
void holes(Rows const& rows, std::size_t count, Make const& make)
{
  constexpr std::size_t size = 4096;
  auto peer                  = make();
  auto stream                = peer->stream();
  std::vector<void*> blocks;
  blocks.reserve(2 * count);
  // Making the holes is the slow part for a linear free list and is not measured.
  double const limit = 5 * rows.options().seconds;
  Stopwatch watch;
  std::string trouble;
  while (blocks.size() < 2 * count && trouble.empty()) {
    void* block = peer->allocate(size, stream);
    if (block == nullptr) {
      trouble = "an allocation failed";
    } else {
      blocks.push_back(block);
      if (watch.seconds() > limit) { trouble = "filling took over " + text(limit) + " s"; }
    }
  }
  for (std::size_t at = 0; at < blocks.size() && trouble.empty(); at += 2) {
    peer->free(blocks[at], size, stream);
    blocks[at] = nullptr;
    if (watch.seconds() > limit) { trouble = "making the holes took over " + text(limit) + " s"; }
  }
  peer->synchronize();
  if (trouble.empty()) {
    print(rows, "holes", count, measure_pairs(*peer, stream, 1024, rows.options().seconds));
  } else {
    rows.skipped("holes", count, trouble);
  }
  for (void* block : blocks) {
    if (block != nullptr) { peer->free(block, size, stream); }
  }
  peer->synchronize();
}

/// Does nothing, so that what the random workload itself costs can be subtracted.
struct Nothing {
  struct Stream {};

  void* allocate(std::size_t, Stream) { return this; }
  void free(void*, std::size_t, Stream) {}
};

struct RandomRun {
  double seconds         = 0;
  std::size_t operations = 0;
  std::size_t failed     = 0;
  std::size_t peak_live  = 0;
  std::uint64_t peak     = 0;
  std::uint64_t fnv      = 0;
  bool complete          = true;
};

/// RMM's random allocations. A checked run also hashes what it does and stops after `limit` seconds.
template <bool Checked, class Peer>
RandomRun random_run(Peer& peer, typename Peer::Stream stream, std::size_t allocations, std::size_t max_mib, double limit = 0)
{
  struct Block {
    void* address;
    std::uint64_t bytes;
  };
  constexpr std::uint64_t cap = std::uint64_t{16000} << 20;
  Minstd random;
  std::vector<Block> live;
  live.reserve(allocations);
  RandomRun run;
  Fnv fnv;
  std::size_t allocated = 0;
  std::uint64_t bytes   = 0;
  Stopwatch watch;
  for (std::size_t step = 0; step < 2 * allocations; ++step) {
    std::uint64_t size         = random.draw(1, max_mib * mib);
    std::uint64_t const choice = live.empty() ? 0 : random.draw(0, 99);
    bool const allocate        = live.empty() || (choice < 73 && allocated < allocations && bytes + size < cap);
    ++run.operations;
    if (allocate) {
      opaque(size);
      void* block = peer.allocate(size, stream);
      opaque(block);
      if (block != nullptr) {
        live.push_back({block, size});
        ++allocated;
        bytes += size;
        run.peak = std::max(run.peak, bytes);
        if constexpr (Checked) {
          run.peak_live = std::max(run.peak_live, live.size());
          fnv.add(1);
          fnv.add(size);
        }
      } else {
        ++run.failed;
      }
      if (block != nullptr || live.empty()) { continue; }
    }
    std::size_t const at = random.draw(0, allocations - 1) % live.size();
    Block const freed    = live[at];
    live[at]             = live.back();
    live.pop_back();
    bytes -= freed.bytes;
    peer.free(freed.address, freed.bytes, stream);
    if constexpr (Checked) {
      fnv.add(2);
      fnv.add(at);
      if (limit > 0 && step % 64 == 0 && watch.seconds() > limit) {
        run.complete = false;
        break;
      }
    }
  }
  run.seconds = watch.seconds();
  run.fnv     = fnv.value();
  for (Block const& block : live) { peer.free(block.address, block.bytes, stream); }
  return run;
}

/// Ends the program when the generator or the loop differs from the published workload: no figure would mean anything.
inline void check(RandomRun const& run, std::size_t allocations, std::size_t max_mib)
{
  for (auto const& wanted : random_checks) {
    if (wanted.allocations == allocations && wanted.max_mib == max_mib &&
        (wanted.fnv != run.fnv || wanted.peak_live != run.peak_live || wanted.peak_bytes != run.peak)) {
      std::fprintf(stderr,
                   "random %zu of %zu MiB: peak live %zu, peak bytes %" PRIu64 ", hash %016" PRIx64
                   "; expected %zu, %" PRIu64 ", %016" PRIx64 "\n",
                   allocations,
                   max_mib,
                   run.peak_live,
                   run.peak,
                   run.fnv,
                   wanted.peak_live,
                   wanted.peak_bytes,
                   wanted.fnv);
      std::exit(3);
    }
  }
}

inline std::string random_name(std::size_t allocations)
{
  return allocations == 100000 ? "random" : "random-" + std::to_string(allocations);
}

template <class Make>
void random(Rows const& rows, std::size_t max_mib, Make const& make)
{
  std::size_t const allocations = rows.options().allocations;
  double const seconds          = rows.options().seconds;
  auto const name               = random_name(allocations);
  auto peer                     = make();
  if (peer->total_bytes() < std::uint64_t{64} << 30) { return rows.skipped(name, max_mib, "needs a device of 64 GiB"); }
  auto stream            = peer->stream();
  RandomRun const warmed = random_run<true>(*peer, stream, allocations, max_mib, seconds);
  peer->synchronize();
  if (!warmed.complete) {
    return rows.skipped(name,
                        max_mib,
                        "over " + text(seconds) + " s; " + std::to_string(warmed.operations) + " of " +
                          std::to_string(2 * allocations) + " operations done; " +
                          text(std::round(warmed.seconds * 1e9 / static_cast<double>(warmed.operations))) + " ns each so far");
  }
  if (warmed.failed == 0) { check(warmed, allocations, max_mib); }
  double best        = 0;
  std::size_t failed = 0;
  int turns          = 0;
  for (Stopwatch watch; turns < 5 && (turns == 0 || watch.seconds() < seconds); ++turns) {
    RandomRun const run = random_run<false>(*peer, stream, allocations, max_mib);
    peer->synchronize();
    failed += run.failed;
    best = turns == 0 ? run.seconds : std::min(best, run.seconds);
  }
  if (failed > 0) { return rows.skipped(name, max_mib, std::to_string(failed) + " allocations failed"); }
  if (turns < 5) { rows.note("stopped by the clock after " + std::to_string(turns) + " runs"); }
  Nothing nothing;
  double idle = 0;
  for (int turn = 0; turn < 5; ++turn) {
    RandomRun const run = random_run<false>(nothing, {}, allocations, max_mib);
    idle                = turn == 0 ? run.seconds : std::min(idle, run.seconds);
  }
  rows.value(name, max_mib, (best - idle) * 1e9 / static_cast<double>(warmed.operations), "ns");
}

/// Threads with a stream and 64 slots each; a step picks a slot and fills or empties it. Each thread makes a million steps, or as
/// many as it can until the clock stops all of them.
template <class Make>
void threads(Rows const& rows, std::size_t count, Make const& make)
{
  constexpr std::size_t steps = 1000000;
  auto peer                   = make();
  double const limit          = rows.options().seconds / 2;
  std::atomic<std::size_t> ready{0};
  std::atomic<bool> go{false};
  std::atomic<std::size_t> done{0};
  std::atomic<bool> failed{false};
  std::vector<double> ends(count);
  std::optional<Stopwatch> watch;
  std::vector<std::thread> workers;
  for (std::size_t thread = 0; thread < count; ++thread) {
    workers.emplace_back([&, thread, stream = peer->stream()] {
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
  if (failed) { return rows.skipped("threads", count, "an allocation failed"); }
  double const seconds = *std::max_element(ends.begin(), ends.end());
  rows.value("threads", count, static_cast<double>(done) / seconds / 1e6, "Mops/s");
}

/// Every workload for one variant of a peer. A peer that throws loses the row, not the rest.
template <class Make>
void run(Options const& options, std::string const& peer, std::string const& variant, Make const& make)
{
  Rows const rows{options, peer, variant};
  auto each = [&](char const* kind, std::string const& name, std::size_t parameter, auto const& workload) {
    if (!rows.wants(kind, name, parameter)) { return; }
    try {
      workload(rows, parameter, make);
    } catch (std::exception const& error) {
      rows.skipped(name, parameter, error.what());
    }
  };
  for (std::size_t bytes : {std::size_t{256}, std::size_t{1} << 10, std::size_t{64} << 10, mib, 64 * mib}) {
    each("pair", "pair", bytes, pair<Make>);
  }
  for (std::size_t count : {4 << 10, 16 << 10, 64 << 10}) { each("holes", "holes", count, holes<Make>); }
  for (std::size_t max_mib : {1, 4, 64, 256, 1024, 4096}) {
    each("random", random_name(options.allocations), max_mib, random<Make>);
  }
  std::size_t const cores = std::max(1U, std::thread::hardware_concurrency());
  for (std::size_t count : {1, 2, 4, 8, 16}) {
    if (count <= 2 * cores) { each("threads", "threads", count, threads<Make>); }
  }
}

}  // namespace peers
