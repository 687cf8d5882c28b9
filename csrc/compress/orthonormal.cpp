#include "orthonormal.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace sn {
namespace {

constexpr double kLeast = 0.5;  // least nonzero squared norm: nonzero integers have at least 1
constexpr int kHigh = 300;      // exponents of powers of two range from -kHigh to kHigh
constexpr int64_t kRun = 256;   // numbers of a row processed at a time

// Products of a row with all rows up to itself: integers, so that the order of sums is irrelevant.
SN_CLONES void products(const double* rows, int64_t row, int64_t width, double* found) {
  const double* own = rows + row * width;
  const int64_t even = width / 16 * 16;
  for (int64_t at = 0; at <= row; ++at) {
    const double* other = rows + at * width;
    double lanes[16] = {};
    for (int64_t k = 0; k < even; k += 16)
      for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += own[k + lane] * other[k + lane];
    for (int64_t k = even; k < width; ++k) lanes[k - even] += own[k] * other[k];
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    found[at] = sum;
  }
}

// A row of the transform times the rows up to it: also integers.
SN_CLONES void combine(const double* factors, const double* rows, int64_t row, int64_t width,
                       double unit, float* out) {
  for (int64_t start = 0; start < width; start += kRun) {
    const int64_t here = std::min(kRun, width - start);
    double total[kRun] = {};
    for (int64_t at = 0; at <= row; ++at) {
      const double factor = factors[at];
      const double* own = rows + at * width + start;
      for (int64_t k = 0; k < here; ++k) total[k] += factor * own[k];
    }
    for (int64_t k = 0; k < here; ++k) out[start + k] = static_cast<float>(total[k] * unit);
  }
}

SN_CLONES void subtract(double factor, const double* from, double* row, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    const double term = factor * from[k];
    row[k] -= term;
  }
}

// The exponent of the least power of two that is not below a magnitude.
int above(double peak) {
  if (!(peak > 0)) return -kHigh;
  int exponent;
  const double mantissa = std::frexp(peak, &exponent);
  return std::min(std::max(mantissa == 0.5 ? exponent - 1 : exponent, -kHigh), kHigh);
}

template <typename Whole>
void widen(const Whole* sums, int64_t count, double* wide) {
  for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<double>(sums[i]);
}

}  // namespace

template <typename Whole>
void Orthonormal::operator()(const Whole* sums, const float* instead, int64_t rows, int64_t width,
                             int bits, float* out) {
  wide_.resize(static_cast<size_t>(rows * width));
  widen(sums, rows * width, wide_.data());
  work(instead, rows, width, bits, out);
}

void Orthonormal::work(const float* instead, int64_t rows, int64_t width, int bits, float* out) {
  const int64_t length = 2 * rows;  // of [gram, unit], for Gaussian elimination
  both_.assign(static_cast<size_t>(rows * length), 0.0);
  scales_.resize(static_cast<size_t>(rows));
  line_.resize(static_cast<size_t>(rows));
  double* both = both_.data();
  for (int64_t i = 0; i < rows; ++i) {
    products(wide_.data(), i, width, both + i * length);
    for (int64_t at = 0; at < i; ++at) both[at * length + i] = both[i * length + at];
    both[i * length + rows + i] = 1;
  }
  for (int64_t j = 0; j < rows; ++j) {
    const double* own = both + j * length;
    const double scale = own[j] >= kLeast ? 1 / own[j] : 0;
    scales_[static_cast<size_t>(j)] = scale;
    for (int64_t i = j + 1; i < rows; ++i) {
      double* other = both + i * length;
      subtract(other[j] * scale, own + j + 1, other + j + 1, rows);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* found = out + i * width;
    const double scale = scales_[static_cast<size_t>(i)];
    if (scale == 0) {
      if (instead)
        std::copy_n(instead + i * width, width, found);
      else
        std::fill_n(found, width, 0.0f);
      continue;
    }
    const double root = std::sqrt(scale), *own = both + i * length + rows;
    double peak = 0;
    for (int64_t at = 0; at <= i; ++at) {
      line_[static_cast<size_t>(at)] = own[at] * root;
      peak = std::max(peak, std::fabs(line_[static_cast<size_t>(at)]));
    }
    const int exponent = std::max(above(peak), bits - kHigh) - bits;
    const double up = std::ldexp(1.0, -exponent);
    for (int64_t at = 0; at <= i; ++at)
      line_[static_cast<size_t>(at)] = std::nearbyint(line_[static_cast<size_t>(at)] * up);
    combine(line_.data(), wide_.data(), i, width, std::ldexp(1.0, exponent), found);
  }
}

template void Orthonormal::operator()(const int32_t*, const float*, int64_t, int64_t, int, float*);
template void Orthonormal::operator()(const double*, const float*, int64_t, int64_t, int, float*);

}  // namespace sn
