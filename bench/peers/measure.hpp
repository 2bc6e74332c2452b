// How time is measured, and the pair that most workloads are made of.

#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

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
/// Timed runs of what is run as a whole: as many as the row's time allows, and three where they end in four times that.
inline constexpr int most_runs = 25;
inline constexpr int few_runs  = 3;
/// Runs with an allocator that does nothing: as many as were timed, and no fewer than these.
inline constexpr int least_idle_runs = 5;

inline bool runs_again(int turns, double spent, double seconds)
{
  return turns < most_runs && (turns == 0 || spent < seconds || (turns < few_runs && spent < 4 * seconds));
}

/// Seconds after which a row is given up. The same for every peer and whatever a row's time is; docs/benchmarks.md defines them.
namespace limits {
inline constexpr double random  = 1.0;
inline constexpr double filling = 2.0;
inline constexpr double small   = 2.0;
inline constexpr double replay  = 1.0;
inline constexpr double churn   = 1.0;
}  // namespace limits

/// Why a row was given up, and how near it was to the end.
inline std::string given_up(double limit, std::size_t done, std::size_t all)
{
  return "over " + text(limit) + " s; " + std::to_string(done) + " of " + std::to_string(all) + " operations done";
}

/// The time of one allocate and free of `bytes` in nanoseconds, over 101 batches of 1000; fewer, but at least 3, when `seconds` have
/// passed. A quarter of `seconds` before that does not count: a processor that has waited for a request takes its time to be fast
/// again. Nothing when an allocation fails.
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
  do { batch(); } while (!failed && warming.seconds() < seconds / 4);
  std::vector<double> times;
  Stopwatch watch;
  while (!failed && times.size() < batches && (times.size() < 3 || watch.seconds() < seconds)) { times.push_back(batch()); }
  peer.synchronize();
  if (failed) { return std::nullopt; }
  std::sort(times.begin(), times.end());
  return Figures{times[times.size() / 2], times.front(), times.size()};
}

inline void print(Rows const& rows, std::optional<Figures> const& figures)
{
  if (!figures) { return rows.skipped("an allocation failed"); }
  if (figures->batches < batches) { rows.note("stopped by the clock after " + std::to_string(figures->batches) + " batches"); }
  rows.value(figures->median, "ns");
  rows.also("-best", rows.request().parameter, figures->best, "ns");
}

/// Does nothing, so that what a workload itself costs can be subtracted.
struct Nothing {
  struct Stream {};

  void* allocate(std::size_t, Stream) { return this; }
  void free(void*, std::size_t, Stream) {}
};

}  // namespace peers
