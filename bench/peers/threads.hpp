// Concurrent threads that allocate and free, and a task that migrates between threads, on any number of streams. docs/benchmarks.md
// defines them.

#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "generators.hpp"
#include "measure.hpp"

namespace peers {

/// Workers that a migrating task visits, and its steps on each.
constexpr std::size_t workers_visited   = 16;
constexpr std::size_t steps_on_a_worker = 100;

/// The assignment of threads to streams, and the sizes.
struct Shape {
  /// Tasks, each on its own thread; 0 for one task that moves to the next of 16 threads after 100 steps.
  std::size_t tasks;
  std::size_t streams;
  /// Whether consecutive blocks of a task use consecutive streams. Otherwise all blocks of task number n are on stream n.
  bool streams_in_turn;
  std::size_t max_bytes;

  [[nodiscard]] std::size_t threads() const { return tasks == 0 ? workers_visited : tasks; }

  /// Threads with a stream each.
  static Shape apart(std::size_t threads) { return {threads, threads, false, mib}; }

  /// Threads on one stream.
  static Shape shared(std::size_t threads) { return {threads, 1, false, mib}; }

  /// Parses `shape-STREAMS-THREADS`, for blocks of up to `kib` KiB; THREADS may be `migrating`.
  static std::optional<Shape> parse(std::string const& workload, std::size_t kib)
  {
    std::string const prefix = "shape-";
    if (workload.rfind(prefix, 0) != 0) { return {}; }
    char* end                 = nullptr;
    std::size_t const streams = std::strtoull(workload.c_str() + prefix.size(), &end, 10);
    if (streams == 0 || *end != '-') { return {}; }
    std::string const rest = end + 1;
    if (rest == "migrating") { return Shape{0, streams, true, kib << 10}; }
    std::size_t const threads = std::strtoull(rest.c_str(), &end, 10);
    if (threads == 0 || *end != 0) { return {}; }
    return Shape{threads, streams, true, kib << 10};
  }
};

/// A table of slots; a step picks one and fills or empties it.
template <class Peer>
class Task {
 public:
  using Stream = decltype(std::declval<Peer&>().stream());

  Task(std::size_t number, Shape const& shape, Peer& peer, std::vector<Stream> const& streams)
    : peer_{peer},
      streams_{streams},
      stream_{number % streams.size()},
      stride_{shape.streams_in_turn ? 1U : 0U},
      max_bytes_{shape.max_bytes},
      random_{0x9e3779b9 + number}
  {
  }

  /// Makes one step; returns false if there was no memory.
  bool step()
  {
    Slot& slot = slots_[random_.below(64)];
    if (slot.address != nullptr) {
      peer_.free(slot.address, slot.bytes, streams_[slot.stream]);
      slot.address = nullptr;
      return true;
    }
    slot.bytes   = 1 + random_.below(max_bytes_);
    slot.stream  = stream_;
    slot.address = peer_.allocate(slot.bytes, streams_[stream_]);
    stream_ += stride_;
    if (stream_ >= streams_.size()) { stream_ = 0; }
    return slot.address != nullptr;
  }

  /// Makes `most` steps, or fewer if `seconds` pass; returns their number.
  std::size_t work(std::size_t most, double seconds, std::atomic<bool>& failed)
  {
    Stopwatch own;
    for (std::size_t step = 0; step < most; ++step) {
      if (step % 256 == 255 && own.seconds() > seconds) { return step; }
      if (!this->step()) { failed = true; }
    }
    return most;
  }

  void end()
  {
    for (Slot const& slot : slots_) {
      if (slot.address != nullptr) { peer_.free(slot.address, slot.bytes, streams_[slot.stream]); }
    }
  }

 private:
  struct Slot {
    void* address;
    std::size_t bytes;
    std::size_t stream;
  };

  Peer& peer_;
  std::vector<Stream> const& streams_;
  /// The stream of the next block.
  std::size_t stream_;
  std::size_t stride_;
  std::size_t max_bytes_;
  Slot slots_[64] = {};
  Xorshift random_;
};

/// Measures the steps of all threads in millions per second. Each task makes a million steps, or as many as fit into the row's time.
template <class Make>
void threads(Rows const& rows, Shape const& shape, Make const& make)
{
  constexpr std::size_t steps = 1000000;
  constexpr std::size_t warm  = 20 * workers_visited;
  std::size_t const count     = shape.threads();
  if (count > 2 * std::max(1U, std::thread::hardware_concurrency())) { return rows.skipped("more than two threads for each core"); }
  auto peer          = make(false);
  using OnePeer      = std::remove_reference_t<decltype(*peer)>;
  double const limit = rows.options().seconds / 2;
  std::vector<typename Task<OnePeer>::Stream> streams;
  for (std::size_t at = 0; at < shape.streams; ++at) { streams.push_back(peer->stream()); }
  std::atomic<std::size_t> ready{0};
  std::atomic<bool> go{false};
  std::atomic<std::size_t> done{0};
  std::atomic<bool> failed{false};
  std::vector<double> ends(count);
  std::optional<Stopwatch> watch;
  // A peer that throws must neither end the program nor block the other threads.
  auto guarded = [&](auto const& part) {
    try {
      part();
    } catch (std::exception const& error) {
      failed = true;
      rows.note(error.what());
    }
  };
  auto pinned = [&](std::size_t number) {
    Task<OnePeer> task{number, shape, *peer, streams};
    guarded([&] { task.work(steps / 10, limit / 2, failed); });
    ++ready;
    while (!go) { std::this_thread::yield(); }
    guarded([&] { done += task.work(steps, limit, failed); });
    ends[number] = watch->seconds();
    guarded([&] { task.end(); });
  };
  // The migrating task: whose turn it is, and when the first timed visit began.
  Task<OnePeer> moving{0, shape, *peer, streams};
  std::atomic<std::size_t> turn{0};
  std::atomic<bool> over{false};
  std::optional<Stopwatch> since;
  auto visited = [&](std::size_t number) {
    ++ready;
    while (!go) { std::this_thread::yield(); }
    while (!over) {
      std::size_t const visit = turn.load(std::memory_order_acquire);
      if (visit % workers_visited != number) { continue; }
      if (visit >= warm) {
        if (!since) { since.emplace(); }
        if (since->seconds() > limit || failed) {
          ends[0] = since->seconds();
          over    = true;
          break;
        }
        done += steps_on_a_worker;
      }
      guarded([&] { moving.work(steps_on_a_worker, limit, failed); });
      turn.store(visit + 1, std::memory_order_release);
    }
  };
  std::vector<std::thread> workers;
  for (std::size_t number = 0; number < count; ++number) {
    workers.emplace_back([&, number] {
      peer->enter_thread();
      shape.tasks == 0 ? visited(number) : pinned(number);
    });
  }
  while (ready < count) { std::this_thread::yield(); }
  watch.emplace();
  go = true;
  for (auto& worker : workers) { worker.join(); }
  guarded([&] { moving.end(); });
  peer->synchronize();
  if (failed) { return rows.skipped("an allocation failed"); }
  double const seconds = *std::max_element(ends.begin(), ends.end());
  rows.value(static_cast<double>(done) / seconds / 1e6, "Mops/s");
}

}  // namespace peers
