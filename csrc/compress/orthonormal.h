// Orthonormalization of integer rows, bit-identical to ops/orthonormal.py; see there.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

// One matrix, [rows, width], of integers whose products float64 sums exactly. A row that depends on
// those before it becomes zeros, or the row of `instead`, which may be null.
// bits : of the transform, which is rounded to integers
class Orthonormal {
 public:
  template <typename Whole>
  void operator()(const Whole* sums, const float* instead, int64_t rows, int64_t width, int bits,
                  float* out);

 private:
  void work(const float* instead, int64_t rows, int64_t width, int bits, float* out);
  std::vector<double> wide_, both_, scales_, line_;
};

}  // namespace sn
