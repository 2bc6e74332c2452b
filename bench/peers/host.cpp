// glibc's malloc on the same workloads, in host memory. It serves as the limit, not as a peer, and to try the workloads with their
// check values without a GPU. The variant `nothing` returns one address and shows how the host alone scales with threads.

#include <cstdlib>

#include "serve.hpp"

namespace {

class Host {
 public:
  explicit Host(bool allocates) : allocates_{allocates} {}

  struct Stream {};

  Stream stream() { return {}; }
  void enter_thread() {}
  void* allocate(std::size_t bytes, Stream) { return allocates_ ? std::malloc(bytes) : this; }
  void free(void* block, std::size_t, Stream)
  {
    if (allocates_) { std::free(block); }
  }
  void free_elsewhere(void* block, std::size_t bytes, Stream stream, Stream, peers::Device const&) { free(block, bytes, stream); }
  void* raw(Stream) { return nullptr; }
  void synchronize() {}
  bool holds_what_it_needs() { return true; }

 private:
  bool allocates_;
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  return peers::serve(options, "glibc", nullptr, [](std::string const& variant, bool) {
    if (variant != "malloc" && variant != "nothing") { peers::unknown_variant(variant); }
    return std::make_unique<Host>(variant == "malloc");
  });
}
