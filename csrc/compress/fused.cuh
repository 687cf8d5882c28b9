// Shared by the fused kernels: the layout of shared memory, loading and storing values.
#pragma once

#include "section.cuh"
#include "transform.cuh"

#if !defined(SN_BLOCK) || !defined(SN_SPAN) || !defined(SN_THREADS) || !defined(SN_TRANSFORM)
#error "compile with -DSN_BLOCK=4096 -DSN_SPAN=64 -DSN_THREADS=256 -DSN_TRANSFORM=0; see launch.py"
#endif

namespace sn {

constexpr int kBlock = SN_BLOCK, kSpan = SN_SPAN, kThreads = SN_THREADS, kTransform = SN_TRANSFORM;
constexpr int kParts = kTransform == kFft || kTransform == kSpectrum ? 2 : 1;
constexpr int kBins = kParts == 2 ? kBlock / 2 + 1 : kBlock;
constexpr int kFloats = kBins * kParts;
// kSpectrum reads and writes the bins themselves; it exists to test selection bit by bit.
constexpr int kInput = kTransform == kSpectrum ? kFloats : kBlock;
constexpr int kSlots = (kBins + kThreads - 1) / kThreads;  // bins per thread
constexpr int kMapWords = 2 * kBins / 32 + 2 > kSlots * kThreads / 32 ? 2 * kBins / 32 + 2
                                                                     : kSlots * kThreads / 32;
static_assert((kBlock & (kBlock - 1)) == 0 && kBlock >= 32 && kBlock <= 8192, "a power of two");
static_assert(kBlock % kSpan == 0 && kSpan >= 32 && (kSpan == kBlock || kTransform == kFft), "a span");
static_assert(kThreads >= 32 && kThreads * 16 >= kBlock, "eight complex points to a thread");

using Threads = Block<kThreads>;
using Fft = RealFft<kBlock, kThreads, kSpan>;

enum Cell { kPeak, kSaturated, kChecksum, kDamaged, kDisorder, kUpper, kDigit, kCells = kDigit + 3 };

struct Shared {
  alignas(16) float data[kBlock + kBlock / 8 + 4];
  u64 sums[2];
  u32 histogram[2][256];
  u32 map[kMapWords], before[kMapWords + 1];
  u32 cells[kCells];
};

SN_DEVICE float& coefficient(Shared& shared, int bin, int part) {
  return shared.data[slot(bin * kParts) + part];
}

// Part of bin t + i * kThreads.
SN_DEVICE float& own(Shared& shared, int t, int i, int part) {
  return shared.data[slot<kThreads * kParts>(t * kParts, i) + part];
}

constexpr int kPairs = (kInput / 2 + kThreads - 1) / kThreads;  // pairs of values per thread

// sqrt(1 / size), rounded once.
SN_DEVICE constexpr float root_of_inverse(int size) {
  double root = 1;
  for (; size > 1; size /= 4) root *= size == 2 ? 0.70710678118654752440 : 0.5;
  return static_cast<float>(root);
}
constexpr float kScale = root_of_inverse(kSpan);

// One element or a pair of neighbours, of each type.
SN_DEVICE float element(u64 from, i64 i, int dtype) {
  if (dtype == kFloat32) return pointer<const float>(from)[i];
  const u32 code = pointer<const u16>(from)[i];
  return dtype == kFloat16 ? from_half(code) : from_bfloat(code);
}

template <int Dtype>
SN_DEVICE Complex element_pair(u64 from, i64 pair) {
  if (Dtype == kFloat32) return pointer<const Complex>(from)[pair];
  const u32 both = pointer<const u32>(from)[pair];
  if (Dtype == kFloat16) return {from_half(both & 0xFFFFu), from_half(both >> 16)};
  return {float_of(both << 16), float_of(both & 0xFFFF0000u)};
}

SN_DEVICE void set_element(u64 to, i64 i, int dtype, float value) {
  if (dtype == kFloat32)
    pointer<float>(to)[i] = value;
  else
    pointer<u16>(to)[i] = static_cast<u16>(dtype == kFloat16 ? to_half(value) : to_bfloat(value));
}

template <int Dtype>
SN_DEVICE void set_pair(u64 to, i64 pair, float a, float b) {
  if (Dtype == kFloat32)
    pointer<Complex>(to)[pair] = {a, b};
  else if (Dtype == kFloat16)
    pointer<u32>(to)[pair] = to_half(a) | to_half(b) << 16;
  else
    pointer<u32>(to)[pair] = to_bfloat(a) | to_bfloat(b) << 16;
}

// The location of a block's values. Complete, aligned blocks are accessed in pairs, eight bytes of
// float32 per thread; others element by element.
struct Values {
  u64 at;
  i64 count;
  int dtype;
  bool pairs;

  SN_DEVICE Values(const Section& section, i64 row) : dtype(section.dtype) {
    const int size = dtype == kFloat32 ? 4 : 2;
    at = section.values + static_cast<u64>(row * kInput * size);
    const i64 left = section.elements - row * kInput;
    count = left < kInput ? left : kInput;
    pairs = count == kInput && at % (2 * size) == 0;
  }

  // Calls use(read) once; read(m) returns elements 2m and 2m + 1. The branch on the type is outside
  // the loop over m, so that its loads do not wait for one another.
  template <typename Use>
  SN_DEVICE void with_reader(Use use) const {
    const u64 from = at;
    if (!pairs) {
      const Values self = *this;
      use([=](int m) -> Complex { return {self.get(2 * m), self.get(2 * m + 1)}; });
    } else if (dtype == kFloat32) {
      use([=](int m) { return element_pair<kFloat32>(from, m); });
    } else if (dtype == kFloat16) {
      use([=](int m) { return element_pair<kFloat16>(from, m); });
    } else {
      use([=](int m) { return element_pair<kBfloat16>(from, m); });
    }
  }

  SN_DEVICE void set(int m, float a, float b) const {
    if (pairs) {
      if (dtype == kFloat32)
        set_pair<kFloat32>(at, m, a, b);
      else if (dtype == kFloat16)
        set_pair<kFloat16>(at, m, a, b);
      else
        set_pair<kBfloat16>(at, m, a, b);
    } else {
      if (2 * m < count) set_element(at, 2 * m, dtype, a);
      if (2 * m + 1 < count) set_element(at, 2 * m + 1, dtype, b);
    }
  }

 private:
  SN_DEVICE float get(int i) const { return i < count ? element(at, i, dtype) : 0.0f; }
};

// Functors that use a reader. Structs, not lambdas: NVRTC treats a generic lambda as a host
// function.
struct TransformPairs {
  const Threads& block;
  float* data;
  const Complex* twiddles;

  template <typename Read>
  SN_DEVICE void operator()(Read read) const {
    Fft::template transform<false>(
        block, data, twiddles, [&](int b, int r) { return read(Fft::place<8>(b, r)); });
  }
};

struct StorePairs {
  const Threads& block;
  float* data;

  template <typename Read>
  SN_DEVICE void operator()(Read read) const {
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kPairs; ++i)
        if (inside<kInput / 2, kThreads>(t, i))
          point<kThreads>(data, t, i) = read(t + i * kThreads);
    });
  }
};

// data := coefficients of the block.
SN_DEVICE void forward(const Threads& block, Shared& shared, const Values& values,
                       const Complex* twiddles) {
  float* data = shared.data;
  if constexpr (kTransform == kFft) {
    values.with_reader(TransformPairs{block, data, twiddles});
    if constexpr (kSpan < kBlock)
      Fft::separate_spans(block, data, twiddles, kScale);
    else
      Fft::separate(block, data, twiddles, kScale);
  } else {
    values.with_reader(StorePairs{block, data});
    if constexpr (kTransform == kHadamard) hadamard<kBlock, kThreads>(block, data, kScale);
    if constexpr (kTransform == kDct) {
      // Even elements ascending, then odd ones descending: two of either form a point.
      Fft::template transform<true>(block, data, twiddles, [&](int b, int r) -> Complex {
        const int m = b + r * (kBlock / 16);
        const int i = m < kBlock / 4 ? 4 * m : 2 * kBlock - 1 - 4 * m;
        return {data[slot(i)], data[slot(m < kBlock / 4 ? i + 2 : i - 2)]};
      });
      dct_from_points<kBlock, kThreads>(block, data, twiddles, kScale);
    }
  }
}

// The values whose coefficients are in data.
SN_DEVICE void inverse(const Threads& block, Shared& shared, const Values& values,
                       const Complex* twiddles) {
  float* data = shared.data;
  if constexpr (kTransform == kFft && kSpan < kBlock) {
    Fft::join_spans(block, data, twiddles, kScale);
  } else if constexpr (kTransform == kFft) {
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < Fft::kPairs; ++i) {
        const int k = t + i * kThreads;
        if (!inside<kBlock / 4 + 1, kThreads>(t, i)) continue;
        const auto [low, high] = Fft::point_pair(point(data, k), point(data, kBlock / 2 - k),
                                                 twiddles, kScale, k);
        point(data, k) = low;
        if (k) point(data, kBlock / 2 - k) = high;
      }
    });
  }
  if constexpr (kTransform == kDct)
    points_from_dct<kBlock, kThreads>(block, data, twiddles, kScale);
  if constexpr (kTransform == kHadamard) hadamard<kBlock, kThreads>(block, data, kScale);
  if constexpr (kTransform == kFft || kTransform == kDct)
    Fft::template transform<true>(block, data, twiddles, [&](int b, int r) {
      return point<kSpan / 16>(data, Fft::place<8>(b, 0), r);
    });
  block.each([&](int t) {
    SN_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int m = t + i * kThreads;
      if (!inside<kInput / 2, kThreads>(t, i)) continue;
      // Points are swapped after an inverse transform.
      if (kTransform == kDct) {
        values.set(m, data[slot(m ^ 1)], data[slot((kBlock - 1 - m) ^ 1)]);
      } else {
        const Complex both = point<kThreads>(data, t, i);
        if (kTransform == kFft)
          values.set(m, both.im, both.re);
        else
          values.set(m, both.re, both.im);
      }
    }
  });
}

}  // namespace sn
