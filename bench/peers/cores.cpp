// The number of cores that this host provides, and the current speed of each of its processors.
//
// Cores: a thread on every processor multiplies, compared with one thread alone. One thread can occupy the multiplier of a core, so
// two threads that share a core get half of it each. The sum over all processors, divided by the rate of one alone, counts
// physical cores, less what other guests of the machine use.
//
// Speed: one thread adds to many registers at once and uses every issue slot of its core. A busy sibling thread, of this guest
// or of another, halves its rate, as it slows any busy program.
//
//     cores [--seconds S]              prints `host,cores,cores,PROCESSORS,COUNT,cores`
//     cores --each [--seconds S]       prints `host,cores,alone,PROCESSOR,RATE,M/s` for every processor instead
//     cores --serve [--seconds S]      answers each line, `each` or the number of a processor, with such rows and a line with a dot

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

namespace {

// Returns the rates of `processors` that multiply concurrently, in millions per second.
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

/// Returns the rate of additions on a processor in millions per second. It is the median of three parts of `seconds`, so that one
/// interruption does not count, after half a part that wakes the processor.
double add(int processor, double seconds)
{
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) { return 0; }
  constexpr int turns = 2000;
  auto part           = [&](double limit) {
    std::uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6, g = 7, h = 8;
    std::uint64_t rounds = 0;
    double took          = 0;
    auto const start     = std::chrono::steady_clock::now();
    do {
      for (int turn = 0; turn < turns; ++turn) {
        asm volatile(
          "add $1, %0\n\tadd $1, %1\n\tadd $1, %2\n\tadd $1, %3\n\tadd $1, %4\n\tadd $1, %5\n\tadd $1, %6\n\tadd $1, %7"
          : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f), "+r"(g), "+r"(h)
          :
          : "cc");
      }
      rounds += turns;
      took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } while (took < limit);
    return 8.0 * static_cast<double>(rounds) / took / 1e6;
  };
  part(seconds / 6);
  double rates[3];
  for (double& rate : rates) { rate = part(seconds / 3); }
  std::sort(rates, rates + 3);
  return rates[1];
}

void alone(std::vector<int> const& processors, double seconds)
{
  for (int processor : processors) { std::printf("host,cores,alone,%d,%.0f,M/s\n", processor, add(processor, seconds)); }
}

/// Answers requests until the input ends.
void serve(std::vector<int> const& all, double seconds)
{
  for (std::string line; std::getline(std::cin, line);) {
    char* end           = nullptr;
    long const asked    = std::strtol(line.c_str(), &end, 10);
    bool const is_known = !line.empty() && *end == 0 && std::find(all.begin(), all.end(), asked) != all.end();
    if (line == "each") {
      alone(all, seconds);
    } else if (is_known) {
      alone({static_cast<int>(asked)}, seconds);
    } else {
      std::printf("host,cores,alone,0,,skipped: no processor '%s'; accepted are each and the numbers of processors\n", line.c_str());
    }
    std::printf(".\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** values)
{
  double seconds = 0;
  bool each      = false;
  bool serves    = false;
  bool is_wrong  = false;
  for (int at = 1; at < count; ++at) {
    if (std::strcmp(values[at], "--seconds") == 0 && at + 1 < count) {
      seconds  = std::atof(values[++at]);
      is_wrong = !(seconds > 0);
    } else if (std::strcmp(values[at], "--each") == 0) {
      each = true;
    } else if (std::strcmp(values[at], "--serve") == 0) {
      serves = true;
    } else {
      std::fprintf(stderr, "cores: unknown argument '%s'; accepted are --seconds S, --each and --serve\n", values[at]);
      return 2;
    }
  }
  if (is_wrong) {
    std::fprintf(stderr, "cores: bad number of seconds; accepted is a number above 0\n");
    return 2;
  }
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::vector<int> all;
  for (int at = 0; at < CPU_SETSIZE; ++at) {
    if (CPU_ISSET(at, &allowed)) { all.push_back(at); }
  }
  if (each || serves) {
    // A speed is requested often, so its measurement is short.
    if (!(seconds > 0)) { seconds = 0.003; }
    serves ? serve(all, seconds) : alone(all, seconds);
    return 0;
  }
  if (!(seconds > 0)) { seconds = 0.05; }
  // The best of three: other guests may have interrupted.
  double one = 0, many = 0;
  for (int turn = 0; turn < 3; ++turn) {
    one = std::max(one, sum(multiply({all.front()}, seconds)));
    many = std::max(many, sum(multiply(all, seconds)));
  }
  std::printf("host,cores,cores,%zu,%.2f,cores\n", all.size(), many / one);
}
