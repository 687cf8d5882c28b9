// Rows of whole numbers as orthonormal rows: see ops/orthonormal.py, whose bits these are.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

// One matrix, [rows, width] of whole numbers whose products float64 sums exactly. A row that
// depends on those before it becomes zeros, or that of `instead`, which may be null.
// bits : of the transform, rounded to whole numbers
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
