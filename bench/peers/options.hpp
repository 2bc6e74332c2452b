// The command line and the output of every peer program.
//
// A row is requested as `VARIANT:WORKLOAD:PARAMETER`, on the command line or, with --serve, line by line on standard input. Standard
// output has lines of `peer,variant,workload,parameter,value,unit`. A row that could not be measured has no value, and the reason
// as its unit. With --serve, a line with a single dot ends each answer. Everything else goes to standard error.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace peers {

struct Options {
  /// The time for measuring one row.
  double seconds = 1.0;
  /// The kernels, as PTX; empty if there are none.
  std::string ptx;
  /// The folder of the plans to replay; empty if there are none.
  std::string plans;
  bool serve = false;
  std::vector<std::string> rows;
};

[[noreturn]] inline void refuse(char const* program, std::string const& what)
{
  std::fprintf(stderr,
               "%s: %s; accepted are --seconds S (above 0), --ptx FILE, --plans DIR, --serve, and rows as "
               "VARIANT:WORKLOAD:PARAMETER\n",
               program,
               what.c_str());
  std::exit(2);
}

inline Options parse(int count, char** values)
{
  char const* program = values[0];
  Options options;
  for (int at = 1; at < count; ++at) {
    std::string const name = values[at];
    if (name == "--serve") {
      options.serve = true;
    } else if (name.rfind("--", 0) != 0) {
      options.rows.push_back(name);
    } else if (name != "--seconds" && name != "--ptx" && name != "--plans") {
      refuse(program, "unknown argument '" + name + "'");
    } else if (++at == count) {
      refuse(program, "argument '" + name + "' has no value");
    } else if (name == "--ptx") {
      options.ptx = values[at];
    } else if (name == "--plans") {
      options.plans = values[at];
    } else {
      char* end       = nullptr;
      options.seconds = std::strtod(values[at], &end);
      if (*end != 0 || !(options.seconds > 0)) { refuse(program, std::string{"bad number of seconds '"} + values[at] + "'"); }
    }
  }
  if (!options.serve && options.rows.empty()) { refuse(program, "no row to measure"); }
  return options;
}

/// A request: the variant of the peer, the workload, and its parameter.
struct Request {
  std::string variant;
  std::string workload;
  std::size_t parameter = 0;

  /// Parses a request; on failure only sets `trouble` to the reason.
  static Request parse(std::string const& text, std::string& trouble)
  {
    auto const first  = text.find(':');
    auto const second = first == std::string::npos ? first : text.find(':', first + 1);
    Request request;
    if (second == std::string::npos) {
      trouble = "'" + text + "' is not VARIANT:WORKLOAD:PARAMETER";
      return request;
    }
    request.variant      = text.substr(0, first);
    request.workload     = text.substr(first + 1, second - first - 1);
    std::string const at = text.substr(second + 1);
    char* end            = nullptr;
    request.parameter    = std::strtoull(at.c_str(), &end, 10);
    if (at.empty() || *end != 0) { trouble = "'" + at + "' is not a number"; }
    return request;
  }
};

/// The rows that answer one request.
class Rows {
 public:
  Rows(Options const& options, std::string peer, Request request)
    : options_{options}, peer_{std::move(peer)}, request_{std::move(request)}
  {
  }

  [[nodiscard]] Options const& options() const { return options_; }
  [[nodiscard]] Request const& request() const { return request_; }

  /// Prints the requested row.
  void value(double value, char const* unit) const { also("", request_.parameter, value, unit); }

  /// Prints an additional row, named after the requested one.
  void also(std::string const& suffix, std::size_t parameter, double value, char const* unit) const
  {
    std::printf("%s,%s,%s%s,%zu,%.4f,%s\n",
                peer_.c_str(),
                request_.variant.c_str(),
                request_.workload.c_str(),
                suffix.c_str(),
                parameter,
                value,
                unit);
    std::fflush(stdout);
  }

  /// Prints the row without a value; the reason replaces the unit.
  void skipped(std::string reason) const
  {
    for (char& letter : reason) {
      if (letter == ',' || letter == '\n' || letter == '\r' || letter == '"') { letter = ' '; }
    }
    std::printf("%s,%s,%s,%zu,,skipped: %s\n",
                peer_.c_str(),
                request_.variant.c_str(),
                request_.workload.c_str(),
                request_.parameter,
                reason.substr(0, 160).c_str());
    std::fflush(stdout);
  }

  /// Notes on standard error that a figure has fewer samples than usual.
  void note(std::string const& text) const { std::fprintf(stderr, "    %s\n", text.c_str()); }

 private:
  Options const& options_;
  std::string peer_;
  Request request_;
};

}  // namespace peers
