// glibc's malloc on the same workloads: host memory, no GPU. Not a peer but the limit, and the way to try the workloads, with
// their check values, on a machine without a GPU.

#include <cstdlib>

#include "serve.hpp"

namespace {

class Host {
 public:
  struct Stream {};

  Stream stream() { return {}; }
  void enter_thread() {}
  void* allocate(std::size_t bytes, Stream) { return std::malloc(bytes); }
  void free(void* block, std::size_t, Stream) { std::free(block); }
  void free_elsewhere(void* block, std::size_t, Stream, Stream, peers::Device const&) { std::free(block); }
  void* raw(Stream) { return nullptr; }
  void synchronize() {}
  bool holds_what_it_needs() { return true; }
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  return peers::serve(options, "glibc", nullptr, [](std::string const& variant, bool) {
    if (variant != "malloc") { peers::unknown_variant(variant); }
    return std::make_unique<Host>();
  });
}
