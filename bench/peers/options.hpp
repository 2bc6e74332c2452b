// What every peer program accepts on its command line, and how it prints what it measured.
//
// Rows go to standard output as `peer,variant,workload,parameter,value,unit`. A row that could not be measured has no value,
// and its unit says why. Everything else goes to standard error.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace peers {

struct Options {
  /// Only this workload, or all of them when empty.
  std::string only;
  /// How long one row may be measured.
  double seconds = 1.0;
  /// Allocations in one random run.
  std::size_t allocations = 100000;
  /// Rows to leave out, as `variant:workload:parameter`.
  std::vector<std::string> skip;
};

[[noreturn]] inline void refuse(char const* program, std::string const& what)
{
  std::fprintf(stderr,
               "%s: %s; accepted are --only pair|random|holes|threads, --seconds S (above 0), --allocations N (1 to 10000000) "
               "and --skip VARIANT:WORKLOAD:PARAMETER\n",
               program,
               what.c_str());
  std::exit(2);
}

inline Options parse(int count, char** values)
{
  char const* program = values[0];
  Options options;
  for (int at = 1; at < count; at += 2) {
    std::string const name = values[at];
    if (at + 1 == count) { refuse(program, "argument '" + name + "' is unknown or has no value"); }
    std::string const value = values[at + 1];
    char* end               = nullptr;
    if (name == "--only") {
      if (value != "pair" && value != "random" && value != "holes" && value != "threads") {
        refuse(program, "unknown workload '" + value + "'");
      }
      options.only = value;
    } else if (name == "--seconds") {
      options.seconds = std::strtod(value.c_str(), &end);
      if (*end != 0 || !(options.seconds > 0)) { refuse(program, "bad number of seconds '" + value + "'"); }
    } else if (name == "--allocations") {
      options.allocations = std::strtoull(value.c_str(), &end, 10);
      if (*end != 0 || options.allocations < 1 || options.allocations > 10000000) {
        refuse(program, "bad number of allocations '" + value + "'");
      }
    } else if (name == "--skip") {
      options.skip.push_back(value);
    } else {
      refuse(program, "unknown argument '" + name + "'");
    }
  }
  return options;
}

/// The rows of one variant of one peer.
class Rows {
 public:
  Rows(Options const& options, std::string peer, std::string variant)
    : options_{options}, peer_{std::move(peer)}, variant_{std::move(variant)}
  {
  }

  [[nodiscard]] Options const& options() const { return options_; }

  [[nodiscard]] bool wants(char const* kind, std::string const& workload, std::size_t parameter) const
  {
    if (!options_.only.empty() && options_.only != kind) { return false; }
    auto const row = variant_ + ":" + workload + ":" + std::to_string(parameter);
    for (auto const& skipped : options_.skip) {
      if (skipped == row) { return false; }
    }
    std::fprintf(stderr, "%s %s: %s %zu\n", peer_.c_str(), variant_.c_str(), workload.c_str(), parameter);
    return true;
  }

  void value(std::string const& workload, std::size_t parameter, double value, char const* unit) const
  {
    std::printf("%s,%s,%s,%zu,%.3f,%s\n", peer_.c_str(), variant_.c_str(), workload.c_str(), parameter, value, unit);
    std::fflush(stdout);
  }

  /// A row without a value; the reason takes the place of the unit.
  void skipped(std::string const& workload, std::size_t parameter, std::string reason) const
  {
    for (char& letter : reason) {
      if (letter == ',' || letter == '\n' || letter == '\r' || letter == '"') { letter = ' '; }
    }
    std::printf("%s,%s,%s,%zu,,skipped: %s\n",
                peer_.c_str(),
                variant_.c_str(),
                workload.c_str(),
                parameter,
                reason.substr(0, 160).c_str());
    std::fflush(stdout);
  }

  /// Says on standard error what a figure rests on, where that is less than usual.
  void note(std::string const& text) const { std::fprintf(stderr, "    %s\n", text.c_str()); }

 private:
  Options const& options_;
  std::string peer_;
  std::string variant_;
};

}  // namespace peers
