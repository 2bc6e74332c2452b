// The workloads that need only an allocator. docs/benchmarks.md defines them.
//
// A peer is a class with
//     using Stream = ...;                             a cheap handle
//     Stream stream();                                another stream, owned by the peer
//     void* raw(Stream);                              the driver's name for it
//     void enter_thread();                            called first by every new thread
//     void* allocate(std::size_t bytes, Stream);      null if there is no memory
//     void free(void*, std::size_t bytes, Stream);    the stream of the allocation
//     void free_elsewhere(void*, std::size_t bytes, Stream allocated, Stream used, Device const&);
//     void synchronize();                             the device is idle afterwards
//     bool holds_what_it_needs();                     false for an allocator that takes all of its memory at the start
// Every row gets a new one from `make(grows)`, so that no row inherits another's fragmentation. If `grows`, it starts with little
// memory and takes what it needs; otherwise it may start with any amount.

#pragma once

#include "generators.hpp"
#include "measure.hpp"

namespace peers {

template <class Make>
void pair(Rows const& rows, Make const& make)
{
  auto peer = make(false);
  print(rows, measure_pairs(*peer, peer->stream(), rows.request().parameter, rows.options().seconds));
}

/// Measures 1 KiB pairs among `count` blocks of `size`, every second of which is freed if `with_holes`.
template <class Make>
void among(Rows const& rows, std::size_t count, std::size_t size, bool with_holes, Make const& make)
{
  auto peer   = make(false);
  auto stream = peer->stream();
  std::vector<void*> blocks;
  blocks.reserve(count);
  // Freeing the holes is slow with a linear free list and is not measured.
  std::size_t const all = count + (with_holes ? (count + 1) / 2 : 0);
  Stopwatch watch;
  std::string trouble;
  while (blocks.size() < count && trouble.empty()) {
    void* block = peer->allocate(size, stream);
    if (block == nullptr) {
      trouble = "an allocation failed";
    } else {
      blocks.push_back(block);
      if (watch.seconds() > limits::filling) { trouble = given_up(limits::filling, blocks.size(), all); }
    }
  }
  for (std::size_t at = 0; with_holes && at < blocks.size() && trouble.empty(); at += 2) {
    peer->free(blocks[at], size, stream);
    blocks[at] = nullptr;
    if (watch.seconds() > limits::filling) { trouble = given_up(limits::filling, count + at / 2 + 1, all); }
  }
  peer->synchronize();
  if (trouble.empty()) {
    print(rows, measure_pairs(*peer, stream, 1024, rows.options().seconds));
  } else {
    rows.skipped(trouble);
  }
  for (void* block : blocks) {
    if (block != nullptr) { peer->free(block, size, stream); }
  }
  peer->synchronize();
}

}  // namespace peers
