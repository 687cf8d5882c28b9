// Transforms that no library brings. Twin: ops/spectrum.py.
#pragma once

#include <cstdint>

namespace sn {

// Walsh-Hadamard transform of each row of `block` (a power of two) floats, over sqrt(block).
void hadamard(float* rows, int64_t count, int64_t block);

}  // namespace sn
