// Transforms that no library provides: a real FFT of blocks whose length is a power of two, in
// single precision, and Hadamard's. Counterpart: ops/spectrum.py.
//
// The same operations in the same order as there, none of them fused: the same bits on every
// machine, and on ranks with and without the extension. A block may be split into spans with
// separate FFTs, computed together; ops/spectrum.py describes the order of their bins.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

class Fourier {
 public:
  static constexpr int64_t kShortest = 32, kLongest = 65536;

  // span: the length of an FFT, a power of two in that range. block: a multiple of it. roots:
  // [roots_of(span)] floats from ops/spectrum.py, which must outlive this.
  Fourier(int64_t block, int64_t span, const float* roots);
  static int64_t roots_of(int64_t span);

  // Computes the block / 2 + 1 complex bins of `block` floats, as pairs, over sqrt(span).
  void forward(const float* values, float* bins);
  // The inverse. Imaginary parts of the first and last bin are ignored.
  void inverse(const float* bins, float* values);

 private:
  struct Parts {
    float *re, *im;
  };
  Parts scratch(int which);
  // All passes but the first and the last; returns which half of the scratch has the result.
  int middle(int64_t& radix);
  void forward_spans(const float* values, float* bins);
  void inverse_spans(const float* bins, float* values);

  const int64_t points_;  // complex points: half a span
  const int64_t side_;    // spans per block
  const float scale_;
  const float* const roots_;
  std::vector<float> scratch_;  // two complex vectors, each as real and imaginary parts
};

// Walsh-Hadamard transform of each row of `block` (a power of two) floats, over sqrt(block).
void hadamard(float* rows, int64_t count, int64_t block);

}  // namespace sn
