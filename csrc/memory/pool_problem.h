// The packing problem of both packers, buffers over numbered sections of time; and the greedy packer.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

// A section is the time between two neighbouring starts or ends, in which the same buffers are live.
struct Problem {
  std::vector<int32_t> first;   // [n] first section of each buffer
  std::vector<int32_t> last;    // [n] the section after its last one
  std::vector<int64_t> size;    // [n] bytes
  std::vector<int64_t> align;   // [n] bytes, at least 1
  int32_t sections = 0;

  int32_t count() const { return static_cast<int32_t>(size.size()); }
  bool meet(int32_t i, int32_t k) const { return first[i] < last[k] && first[k] < last[i]; }
  int64_t aligned(int32_t i, int64_t offset) const {
    const int64_t over = offset % align[i];
    return over ? offset + (align[i] - over) : offset;
  }
};

// Puts each buffer, in the given order, at the lowest aligned offset that is free during its lifetime;
// tests/oracles/first_fit_oracle.py returns the same offsets.
std::vector<int64_t> first_fit(const Problem& problem, const std::vector<int32_t>& order);

}  // namespace sn
