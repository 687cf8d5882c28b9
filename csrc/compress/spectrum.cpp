#include "spectrum.h"

#include <cmath>

#include "lanes.h"

namespace sn {
namespace {

SN_CLONES void butterflies(float* row, int64_t block, float scale) {
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t start = 0; start < block; start += 2 * half) {
      float* a = row + start;
      float* b = a + half;
      for (int64_t i = 0; i < half; ++i) {
        const float sum = a[i] + b[i], difference = a[i] - b[i];
        a[i] = sum, b[i] = difference;
      }
    }
  for (int64_t i = 0; i < block; ++i) row[i] *= scale;
}

}  // namespace

void hadamard(float* rows, int64_t count, int64_t block) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t i = 0; i < count; ++i) butterflies(rows + i * block, block, scale);
}

}  // namespace sn
