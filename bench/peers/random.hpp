// Random sizes: RMM's random allocations, exactly reproduced, and small blocks.

#pragma once

#include <cinttypes>
#include <cmath>

#include "device.hpp"
#include "generators.hpp"
#include "measure.hpp"

namespace peers {

struct RandomRun {
  double seconds         = 0;
  std::size_t operations = 0;
  std::size_t failed     = 0;
  std::size_t peak_live  = 0;
  std::uint64_t peak     = 0;
  std::uint64_t fnv      = 0;
  bool complete          = true;
};

/// RMM's random allocations. A checked run also hashes its steps and stops after `limit` seconds.
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

/// Ends the program if the generator or the loop differs from the published workload, since its figures would be meaningless.
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

template <class Make>
void random(Rows const& rows, std::size_t allocations, Device const* device, Make const& make)
{
  std::size_t const max_mib = rows.request().parameter;
  double const seconds      = rows.options().seconds;
  if (device != nullptr && device->total() < std::uint64_t{64} << 30) { return rows.skipped("needs a device of 64 GiB"); }
  auto peer              = make(false);
  auto stream            = peer->stream();
  RandomRun const warmed = random_run<true>(*peer, stream, allocations, max_mib, limits::random);
  peer->synchronize();
  if (!warmed.complete) {
    return rows.skipped(given_up(limits::random, warmed.operations, 2 * allocations) + "; " +
                        text(std::round(warmed.seconds * 1e9 / static_cast<double>(warmed.operations))) + " ns each so far");
  }
  if (warmed.failed == 0) { check(warmed, allocations, max_mib); }
  double best        = 0;
  std::size_t failed = 0;
  int turns          = 0;
  for (Stopwatch watch; watch.seconds() + warmed.seconds < seconds / 4;) {
    random_run<false>(*peer, stream, allocations, max_mib);
    peer->synchronize();
  }
  for (Stopwatch watch; runs_again(turns, watch.seconds(), seconds); ++turns) {
    RandomRun const run = random_run<false>(*peer, stream, allocations, max_mib);
    peer->synchronize();
    failed += run.failed;
    best = turns == 0 ? run.seconds : std::min(best, run.seconds);
  }
  if (failed > 0) { return rows.skipped(std::to_string(failed) + " allocations failed"); }
  if (turns < most_runs) { rows.note("stopped by the clock after " + std::to_string(turns) + " runs"); }
  Nothing nothing;
  double idle = 0;
  for (int turn = 0; turn < std::max(turns, least_idle_runs); ++turn) {
    RandomRun const run = random_run<false>(nothing, {}, allocations, max_mib);
    idle                = turn == 0 ? run.seconds : std::min(idle, run.seconds);
  }
  rows.value((best - idle) * 1e9 / static_cast<double>(warmed.operations), "ns");
  rows.also("-idle", max_mib, idle * 1e9 / static_cast<double>(warmed.operations), "ns");
}

/// Blocks of 4 B to 4 KiB: allocates `parameter` of them, then takes ten times as many steps that each free or allocate. The figure
/// is the device memory held at the end, per byte live at the peak.
template <class Make>
void small(Rows const& rows, bool is_log_uniform, Device const* device, Make const& make)
{
  if (device == nullptr) { return rows.skipped("nothing counts what host memory holds"); }
  std::size_t const most     = rows.request().parameter;
  std::uint64_t const before = device->taken();
  auto peer                  = make(true);
  if (!peer->holds_what_it_needs()) { return rows.skipped("takes a fixed amount of memory at the start"); }
  auto stream = peer->stream();
  struct Block {
    void* address;
    std::size_t bytes;
  };
  std::vector<Block> live;
  live.reserve(most);
  Minstd random;
  std::uint64_t bytes = 0;
  std::uint64_t peak  = 0;
  std::string trouble;
  Stopwatch watch;
  auto allocate = [&] {
    std::size_t const size = is_log_uniform ? log_uniform(random, 4, 4096) : random.draw(4, 4096);
    void* block            = peer->allocate(size, stream);
    if (block == nullptr) {
      trouble = "an allocation failed";
      return;
    }
    live.push_back({block, size});
    bytes += size;
    peak = std::max(peak, bytes);
  };
  for (std::size_t step = 0; step < 11 * most && trouble.empty(); ++step) {
    if (step % 256 == 255 && watch.seconds() > limits::small) {
      trouble = given_up(limits::small, step, 11 * most);
    } else if (step < most) {
      allocate();
    } else if (!live.empty() && random.draw(0, 1) == 0) {
      std::size_t const at = random.draw(0, live.size() - 1);
      peer->free(live[at].address, live[at].bytes, stream);
      bytes -= live[at].bytes;
      live[at] = live.back();
      live.pop_back();
    } else if (live.size() < most) {
      allocate();
    }
  }
  peer->synchronize();
  std::uint64_t const held = device->taken() - before;
  for (Block const& block : live) { peer->free(block.address, block.bytes, stream); }
  peer->synchronize();
  if (!trouble.empty()) { return rows.skipped(trouble); }
  rows.value(static_cast<double>(held) / static_cast<double>(peak), "ratio");
}

}  // namespace peers
