// Answers requests with rows: the table of workloads.

#pragma once

#include <iostream>

#include "random.hpp"
#include "replay.hpp"
#include "streams.hpp"
#include "threads.hpp"
#include "workloads.hpp"

namespace peers {

/// Measures a workload; returns false if it is unknown.
template <class Make>
bool measure(Rows const& rows, Device const* device, Make const& make)
{
  auto const& [variant, workload, parameter] = rows.request();
  if (parameter == 0) { return false; }
  if (workload == "pair") {
    pair(rows, make);
  } else if (workload == "holes") {
    among(rows, 2 * parameter, 4096, true, make);
  } else if (workload == "live") {
    among(rows, parameter, 1024, false, make);
  } else if (workload == "threads") {
    threads(rows, Shape::apart(parameter), make);
  } else if (workload == "threads-shared") {
    threads(rows, Shape::shared(parameter), make);
  } else if (auto const shape = Shape::parse(workload, parameter)) {
    threads(rows, *shape, make);
  } else if (workload == "random") {
    random(rows, 100000, device, make);
  } else if (workload == "random-10000") {
    random(rows, 10000, device, make);
  } else if (workload == "random-1000") {
    random(rows, 1000, device, make);
  } else if (workload == "small-uniform" || workload == "small-log") {
    small(rows, workload == "small-log", device, make);
  } else if (workload == "handoff") {
    handoff(rows, device, make);
  } else if (workload == "kernels-cold" || workload == "kernels-warm") {
    kernels(rows, workload == "kernels-warm", device, make);
  } else if (workload.rfind("replay-", 0) == 0) {
    replay(rows, workload.substr(7), device, make);
  } else if (workload == "churn") {
    churn(rows, device, make);
  } else {
    return false;
  }
  return true;
}

/// Answers every request. `make(variant, grows)` creates a peer, or returns null for an unknown variant. A peer that throws loses only
/// its row.
template <class Make>
int serve(Options const& options, std::string const& peer, Device const* device, Make const& make)
{
  bool refused = false;
  auto answer  = [&](std::string const& text) {
    std::string trouble;
    auto const request = Request::parse(text, trouble);
    Rows const rows{options, peer, request};
    if (trouble.empty()) {
      std::fprintf(stderr, "%s %s\n", peer.c_str(), text.c_str());
      auto const makes = [&](bool grows) { return make(request.variant, grows); };
      try {
        if (!measure(rows, device, makes)) { trouble = "unknown workload"; }
      } catch (std::exception const& error) {
        rows.skipped(error.what());
      }
    }
    if (!trouble.empty()) {
      rows.skipped(trouble);
      refused = true;
    }
  };
  for (auto const& row : options.rows) { answer(row); }
  for (std::string line; options.serve && std::getline(std::cin, line);) {
    answer(line);
    std::printf(".\n");
    std::fflush(stdout);
  }
  return refused ? 2 : 0;
}

/// Refuses an unknown variant.
[[noreturn]] inline void unknown_variant(std::string const& variant)
{
  throw std::runtime_error("there is no variant '" + variant + "'");
}

}  // namespace peers
