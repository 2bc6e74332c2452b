// Time measurement, and the allocate/free pair of most workloads.

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

/// Hides from the compiler where a value comes from and whether it is used.
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
/// The number of timed runs of a whole workload: as many as the row's time allows, but three if they fit into four times that.
inline constexpr int most_runs = 25;
inline constexpr int few_runs  = 3;
/// The minimum number of runs with an allocator that does nothing; otherwise as many as were timed.
inline constexpr int least_idle_runs = 5;

inline bool runs_again(int turns, double spent, double seconds)
{
  return turns < most_runs && (turns == 0 || spent < seconds || (turns < few_runs && spent < 4 * seconds));
}

/// The time limits of rows in seconds, independent of the peer and the row's time; docs/benchmarks.md defines them.
namespace limits {
inline constexpr double random  = 1.0;
inline constexpr double filling = 2.0;
inline constexpr double small   = 2.0;
inline constexpr double replay  = 1.0;
inline constexpr double churn   = 1.0;
}  // namespace limits

/// Describes why a row was given up, and how much of it was done.
inline std::string given_up(double limit, std::size_t done, std::size_t all)
{
  return "over " + text(limit) + " s; " + std::to_string(done) + " of " + std::to_string(all) + " operations done";
}

/// Returns the time of one allocate and free of `bytes` in nanoseconds, over 101 batches of 1000, or fewer (at least 3) once
/// `seconds` have passed. A quarter of `seconds` before that is a warm-up: an idle processor needs time to reach its speed.
/// Returns nothing if an allocation fails.
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

/// An allocator that does nothing, to subtract the cost of the workload itself.
struct Nothing {
  struct Stream {};

  void* allocate(std::size_t, Stream) { return this; }
  void free(void*, std::size_t, Stream) {}
};

}  // namespace peers
