// Transforms that no library brings: a real FFT of blocks whose length is a power of two, in single
// precision, and Hadamard's. Twin: ops/spectrum.py.
//
// The same operations in the same order as the twin, none of them fused: the same bits on every
// machine, and on ranks with and without the extension. A block may be cut into spans of their own
// FFTs, which go through the passes side by side; ops/spectrum.py says how their bins lie.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

class Fourier {
 public:
  static constexpr int64_t kShortest = 32, kLongest = 65536;

  // span: a power of two between those, one FFT. block: a multiple of it. roots: [roots_of(span)]
  // floats, ops/spectrum.py makes them; they outlive this.
  Fourier(int64_t block, int64_t span, const float* roots);
  static int64_t roots_of(int64_t span);

  // The block / 2 + 1 complex bins of `block` floats, as pairs, over sqrt(span).
  void forward(const float* values, float* bins);
  // Back. Imaginary parts of the first and last bin count for nothing.
  void inverse(const float* bins, float* values);

 private:
  struct Parts {
    float *re, *im;
  };
  Parts scratch(int which);
  // All passes but the first and the last; returns which half of the scratch holds the outcome.
  int middle(int64_t& radix);
  void forward_spans(const float* values, float* bins);
  void inverse_spans(const float* bins, float* values);

  const int64_t points_;  // complex ones: half a span
  const int64_t side_;    // spans of a block
  const float scale_;
  const float* const roots_;
  std::vector<float> scratch_;  // two complex vectors, each as its real and its imaginary parts
};

// Walsh-Hadamard transform of each row of `block` (a power of two) floats, over sqrt(block).
void hadamard(float* rows, int64_t count, int64_t block);

}  // namespace sn
