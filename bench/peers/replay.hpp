// Replayed logs and long runs: their speed and their memory.

#pragma once

#include <cmath>
#include <fstream>

#include "device.hpp"
#include "generators.hpp"
#include "measure.hpp"

namespace peers {

/// One operation of a plan: allocates a block in a slot, or frees it if `bytes` is 0.
struct Step {
  std::uint32_t stream;
  std::uint32_t slot;
  std::uint64_t bytes;
};

struct Plan {
  std::vector<Step> steps;
  std::size_t streams = 0;
  std::size_t slots   = 0;
  std::uint64_t peak  = 0;
};

/// Reads a plan: lines of `stream slot bytes`. It ends without live blocks.
inline Plan read_plan(std::string const& path)
{
  std::ifstream file{path};
  if (!file) { throw std::runtime_error("no plan " + path); }
  Plan plan;
  std::vector<std::uint64_t> live;
  std::uint64_t bytes = 0;
  for (Step step{}; file >> step.stream >> step.slot >> step.bytes;) {
    if (step.slot >= live.size()) { live.resize(step.slot + 1); }
    if ((step.bytes == 0) == (live[step.slot] == 0)) { throw std::runtime_error("not a plan: " + path); }
    bytes           = bytes + step.bytes - (step.bytes == 0 ? live[step.slot] : 0);
    live[step.slot] = step.bytes;
    plan.peak       = std::max(plan.peak, bytes);
    plan.streams    = std::max<std::size_t>(plan.streams, step.stream + 1);
    plan.steps.push_back(step);
  }
  if (!file.eof() || plan.steps.empty() || bytes != 0) { throw std::runtime_error("not a plan: " + path); }
  plan.slots = live.size();
  return plan;
}

/// The duration of one run in seconds, or why it failed. A run with a `limit` stops there.
struct ReplayRun {
  double seconds = 0;
  std::string trouble;
};

template <class Peer, class Streams>
ReplayRun replay_run(Peer& peer, Streams const& streams, Plan const& plan, double limit = 0)
{
  struct Block {
    void* address     = nullptr;
    std::size_t bytes = 0;
    std::uint32_t stream;
  };
  std::vector<Block> live(plan.slots);
  std::size_t done = 0;
  ReplayRun run;
  Stopwatch watch;
  for (Step const& step : plan.steps) {
    if (++done % 1024 == 0 && limit > 0 && watch.seconds() > limit) {
      run.trouble = given_up(limit, done, plan.steps.size());
      break;
    }
    Block& block = live[step.slot];
    if (step.bytes == 0) {
      peer.free(block.address, block.bytes, streams[block.stream]);
      block.address = nullptr;
    } else {
      block = {peer.allocate(step.bytes, streams[step.stream]), step.bytes, step.stream};
      opaque(block.address);
      if (block.address == nullptr) {
        run.trouble = "an allocation failed";
        break;
      }
    }
  }
  run.seconds = watch.seconds();
  for (Block const& block : live) {
    if (block.address != nullptr) { peer.free(block.address, block.bytes, streams[block.stream]); }
  }
  return run;
}

/// Replays a log by one thread in recorded order, on as many streams as the log has. Blocks are freed on the stream of their allocation.
template <class Make>
void replay(Rows const& rows, std::string const& kind, Device const* device, Make const& make)
{
  if (rows.options().plans.empty()) { return rows.skipped("no plans were given"); }
  Plan const plan            = read_plan(rows.options().plans + "/" + kind + ".plan");
  double const seconds       = rows.options().seconds;
  std::uint64_t const before = device != nullptr ? device->taken() : 0;
  auto peer                  = make(true);
  std::vector<decltype(peer->stream())> streams;
  for (std::size_t at = 0; at < plan.streams; ++at) { streams.push_back(peer->stream()); }
  ReplayRun const warmed = replay_run(*peer, streams, plan, limits::replay);
  peer->synchronize();
  if (!warmed.trouble.empty()) { return rows.skipped(warmed.trouble); }
  std::uint64_t const held = device != nullptr ? device->taken() - before : 0;
  for (Stopwatch watch; watch.seconds() + warmed.seconds < seconds / 4;) {
    replay_run(*peer, streams, plan);
    peer->synchronize();
  }
  double best = 0;
  int turns   = 0;
  for (Stopwatch watch; runs_again(turns, watch.seconds(), seconds); ++turns) {
    ReplayRun const run = replay_run(*peer, streams, plan);
    peer->synchronize();
    if (!run.trouble.empty()) { return rows.skipped(run.trouble); }
    best = turns == 0 ? run.seconds : std::min(best, run.seconds);
  }
  Nothing nothing;
  std::vector<Nothing::Stream> none(plan.streams);
  double idle = best;
  for (int turn = 0; turn < std::max(turns, least_idle_runs); ++turn) {
    idle = std::min(idle, replay_run(nothing, none, plan).seconds);
  }
  rows.value((best - idle) * 1e9 / static_cast<double>(plan.steps.size()), "ns");
  if (held > 0 && peer->holds_what_it_needs()) {
    rows.also("-held", rows.request().parameter, static_cast<double>(held) / static_cast<double>(plan.peak), "ratio");
  }
}

/// The largest size of each tenth of a churn, in KiB.
inline constexpr std::size_t churn_phases[] = {4, 1024, 64, 16384, 256, 4096, 65536, 16, 1024, 65536};

/// A program with changing sizes: ten phases with at most 4 GiB live. The device memory held is sampled 100 times. The figure is its
/// maximum per byte live at the peak so far.
template <class Make>
void churn(Rows const& rows, Device const* device, Make const& make)
{
  if (device == nullptr) { return rows.skipped("nothing counts what host memory holds"); }
  std::size_t const per_phase  = rows.request().parameter / 10;
  constexpr std::uint64_t most = std::uint64_t{4} << 30;
  std::uint64_t const before   = device->taken();
  auto peer                    = make(true);
  if (!peer->holds_what_it_needs()) { return rows.skipped("takes a fixed amount of memory at the start"); }
  auto stream = peer->stream();
  struct Block {
    void* address;
    std::size_t bytes;
  };
  std::vector<Block> live;
  Minstd random;
  std::uint64_t bytes = 0;
  std::uint64_t peak  = 0;
  double worst        = 0;
  std::vector<double> seen;
  std::string trouble;
  double spent = 0;
  for (std::size_t phase = 0; phase < 10 && trouble.empty(); ++phase) {
    for (std::size_t part = 0; part < 10 && trouble.empty(); ++part) {
      Stopwatch watch;
      for (std::size_t step = 0; step < per_phase / 10 && trouble.empty(); ++step) {
        std::size_t const size = log_uniform(random, 256, churn_phases[phase] << 10);
        bool const allocate    = live.empty() || (random.draw(0, 99) < 60 && bytes + size <= most);
        if (allocate) {
          void* block = peer->allocate(size, stream);
          if (block == nullptr) {
            trouble = "an allocation failed";
          } else {
            live.push_back({block, size});
            bytes += size;
            peak = std::max(peak, bytes);
          }
        } else {
          std::size_t const at = random.draw(0, live.size() - 1);
          peer->free(live[at].address, live[at].bytes, stream);
          bytes -= live[at].bytes;
          live[at] = live.back();
          live.pop_back();
        }
      }
      spent += watch.seconds();
      if (spent > limits::churn && trouble.empty()) {
        trouble = given_up(limits::churn, phase * per_phase + (part + 1) * (per_phase / 10), 10 * per_phase);
      }
      // In the first tenth too little is live for a meaningful ratio.
      if (phase > 0) { worst = std::max(worst, static_cast<double>(device->taken() - before) / static_cast<double>(peak)); }
    }
    seen.push_back(static_cast<double>(device->taken() - before) / static_cast<double>(peak));
  }
  for (Block const& block : live) { peer->free(block.address, block.bytes, stream); }
  peer->synchronize();
  if (!trouble.empty()) { return rows.skipped(trouble); }
  rows.value(worst, "ratio");
  rows.also("-time", rows.request().parameter, spent * 1e9 / static_cast<double>(per_phase * 10), "ns");
  for (std::size_t at = 0; at < seen.size(); ++at) { rows.also("-at", 10 * (at + 1), seen[at], "ratio"); }
}

}  // namespace peers
