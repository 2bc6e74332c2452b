// glibc's malloc on the same workloads: host memory, no GPU. Not a peer but the limit, and the way to try the workloads, with
// their check values, on a machine without a GPU.

#include <cstdlib>

#include "workloads.hpp"

namespace {

class Host {
 public:
  struct Stream {};

  Stream stream() { return {}; }
  void enter_thread() {}
  void* allocate(std::size_t bytes, Stream) { return std::malloc(bytes); }
  void free(void* block, std::size_t, Stream) { std::free(block); }
  void synchronize() {}
  // Nothing is touched, so address space is all that is needed.
  std::uint64_t total_bytes() { return ~std::uint64_t{0}; }
};

}  // namespace

int main(int count, char** values)
{
  auto const options = peers::parse(count, values);
  peers::run(options, "glibc", "malloc", [] { return std::make_unique<Host>(); });
}
