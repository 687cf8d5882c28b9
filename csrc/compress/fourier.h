// Real FFT of blocks whose length is a power of two, in single precision. Twin: ops/fourier.py.
//
// The same operations in the same order as the twin, none of them fused: the same bits on every
// machine, and on ranks with and without the extension.
#pragma once

#include <cstdint>
#include <vector>

namespace sn {

class Fourier {
 public:
  static constexpr int64_t kShortest = 32, kLongest = 65536;

  // block: a power of two between those. roots: [roots_of(block)] floats, ops/fourier.py
  // makes them; they outlive this.
  Fourier(int64_t block, const float* roots);
  static int64_t roots_of(int64_t block);

  // The block / 2 + 1 complex bins of `block` floats, as pairs, over sqrt(block).
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

  const int64_t points_;  // complex ones: half a block
  const float scale_;
  const float* const roots_;
  std::vector<float> scratch_;  // two complex vectors, each as its real and its imaginary parts
};

}  // namespace sn
