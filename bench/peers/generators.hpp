// The workloads' random numbers, identical for all peers and xlog, and the hash that verifies them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace peers {

/// Marsaglia's 64-bit xorshift, reduced by the remainder.
class Xorshift {
 public:
  explicit Xorshift(std::uint64_t seed) : state_{seed} {}

  std::size_t below(std::size_t bound)
  {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<std::size_t>(state_ % bound);
  }

 private:
  std::uint64_t state_;
};

/// The minimal standard generator, seed 1, with libstdc++'s bounded draw written out, so that no standard library changes the
/// workload.
class Minstd {
 public:
  std::uint64_t draw(std::uint64_t low, std::uint64_t high)
  {
    constexpr std::uint64_t range = 2147483645;
    std::uint64_t const span      = high - low;
    if (range > span) {
      std::uint64_t const scale = range / (span + 1);
      for (;;) {
        std::uint64_t const value = next() - 1;
        if (value < (span + 1) * scale) { return low + value / scale; }
      }
    }
    if (range < span) {
      for (;;) {
        std::uint64_t const upper = (range + 1) * draw(0, span / (range + 1));
        std::uint64_t const value = upper + (next() - 1);
        if (value <= span && value >= upper) { return low + value; }
      }
    }
    return low + next() - 1;
  }

 private:
  std::uint64_t next() { return state_ = state_ * 16807 % 2147483647; }

  std::uint64_t state_ = 1;
};

/// Draws a size from `low` to `high`; every power of two is equally likely.
inline std::uint64_t log_uniform(Minstd& random, std::uint64_t low, std::uint64_t high)
{
  double const part = static_cast<double>(random.draw(0, 1 << 30)) / static_cast<double>(1 << 30);
  double const from = std::log(static_cast<double>(low));
  auto const size   = static_cast<std::uint64_t>(std::exp(from + part * (std::log(static_cast<double>(high)) - from)));
  return std::clamp(size, low, high);
}

/// 64-bit FNV-1a over little-endian words.
class Fnv {
 public:
  void add(std::uint64_t word)
  {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ (word >> (8 * byte) & 0xff)) * 1099511628211ULL;
    }
  }

  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 14695981039346656037ULL;
};

/// The expected result of a random run without a failed allocation.
struct RandomCheck {
  std::size_t allocations;
  std::size_t max_mib;
  std::size_t peak_live;
  std::uint64_t peak_bytes;
  std::uint64_t fnv;
};

inline constexpr RandomCheck random_checks[] = {
  {1000, 1, 638, 323760572, 0x0a01169c41d5b10b},
  {1000, 64, 528, 16777102043, 0x42dd185240e2338e},
  {1000, 4096, 15, 16775344215, 0xf33f6e239df3e016},
  {10000, 1, 6204, 3254545443, 0xb48179f771930716},
  {10000, 256, 167, 16777171549, 0xa0e15ceb7379d680},
  {100000, 1, 36071, 16777215997, 0xe20b4cec1688e184},
  {100000, 4, 9714, 16777215986, 0x1c19b69f55857e88},
  {100000, 4096, 19, 16777201659, 0x0114dd316b70ed04},
};

}  // namespace peers
