// How many cores this host really gives: threads that do nothing but multiply, one pinned to each processor, against one alone.
//
// A multiplier is busy with every cycle of one thread, so two threads that share a core get half of it each; the sum over all
// processors, divided by what one gets alone, counts physical cores, less what other guests of the machine take.
//
//     cores [--seconds S]        prints `host,cores,cores,PROCESSORS,COUNT,cores`
//     cores --each               prints `host,cores,alone,PROCESSOR,RATE,M/s`, how fast each multiplies alone, instead

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <sched.h>

namespace {

// Millions of multiplications per second of each processor in `processors`, all at once.
std::vector<double> multiply(std::vector<int> const& processors, double seconds)
{
  std::vector<double> rates(processors.size());
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  for (std::size_t at = 0; at < processors.size(); ++at) {
    threads.emplace_back([&, at] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(processors[at], &set);
      sched_setaffinity(0, sizeof set, &set);
      ready.fetch_add(1);
      while (ready.load() < static_cast<int>(processors.size())) {}
      std::uint64_t chains[6] = {3, 5, 7, 9, 11, 13};
      std::uint64_t rounds = 0;
      auto const start = std::chrono::steady_clock::now();
      double took = 0;
      do {
        for (int turn = 0; turn < 10000; ++turn) {
          for (auto& chain : chains) { asm volatile("imul %0, %0" : "+r"(chain)); }
        }
        rounds += 10000;
        took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      } while (took < seconds);
      rates[at] = 6.0 * static_cast<double>(rounds) / took / 1e6;
    });
  }
  for (auto& thread : threads) { thread.join(); }
  return rates;
}

double sum(std::vector<double> const& rates)
{
  double all = 0;
  for (double rate : rates) { all += rate; }
  return all;
}

}  // namespace

int main(int count, char** values)
{
  double seconds = 0.05;
  bool each = false;
  for (int at = 1; at < count; ++at) {
    if (std::strcmp(values[at], "--seconds") == 0 && at + 1 < count) {
      seconds = std::atof(values[++at]);
    } else if (std::strcmp(values[at], "--each") == 0) {
      each = true;
    } else {
      std::fprintf(stderr, "cores: unknown argument '%s'; accepted are --seconds S and --each\n", values[at]);
      return 2;
    }
  }
  if (!(seconds > 0)) {
    std::fprintf(stderr, "cores: bad number of seconds; accepted is a number above 0\n");
    return 2;
  }
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::vector<int> all;
  for (int at = 0; at < CPU_SETSIZE; ++at) {
    if (CPU_ISSET(at, &allowed)) { all.push_back(at); }
  }
  if (each) {
    for (int processor : all) { std::printf("host,cores,alone,%d,%.0f,M/s\n", processor, sum(multiply({processor}, seconds))); }
    return 0;
  }
  // The best of three: another guest may have been there.
  double one = 0, many = 0;
  for (int turn = 0; turn < 3; ++turn) {
    one = std::max(one, sum(multiply({all.front()}, seconds)));
    many = std::max(many, sum(multiply(all, seconds)));
  }
  std::printf("host,cores,cores,%zu,%.2f,cores\n", all.size(), many / one);
}
