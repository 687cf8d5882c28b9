// Orthonormal transforms of one block of N reals in shared memory, N a power of two.
//
// The real FFT is a complex one of N/2 points (Stockham, radix 8, one small radix at the end) and
// a step that separates even and odd elements. The DCT-II is that FFT on reordered elements
// (Makhoul 1980), rotated by at most an eighth of a period. A block may be split into spans of L
// reals with separate FFTs, computed together; ops/spectrum.py describes the order of their bins.
// Every thread holds eight complex points in registers; a pass goes through shared memory once,
// with two barriers. Fused multiply-adds are explicit and contraction is off: the host and every
// GPU round alike.
//
// Element i is stored at slot(i): two floats of padding after every sixteen distribute strides of a
// power of two over the banks.
#pragma once

#include "block.cuh"

namespace sn {

enum Transform { kFft = 0, kDct = 1, kHadamard = 2, kIdentity = 3, kSpectrum = 4 };

struct alignas(8) Complex {
  float re, im;
};

SN_DEVICE Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
SN_DEVICE Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
SN_DEVICE Complex operator*(Complex a, Complex b) {
  return {multiply_add(a.re, b.re, -(a.im * b.im)), multiply_add(a.re, b.im, a.im * b.re)};
}
SN_DEVICE Complex conjugate(Complex a) { return {a.re, -a.im}; }
SN_DEVICE Complex times_i(Complex a) { return {-a.im, a.re}; }
SN_DEVICE Complex swapped(Complex a) { return {a.im, a.re}; }
SN_DEVICE Complex scaled(Complex a, float by) { return {a.re * by, a.im * by}; }

SN_DEVICE constexpr int slot(int i) { return i + ((i >> 4) << 1); }
SN_DEVICE Complex& point(float* data, int i) { return reinterpret_cast<Complex*>(data)[i + (i >> 3)]; }

// slot(i + r * Step) and point(i + r * Step), with the thread-independent part computed at compile
// time: a step of whole rows never carries into the padding.
template <int Step>
SN_DEVICE constexpr int slot(int i, int r) {
  return Step % 16 == 0 ? slot(i) + r * (Step + Step / 8) : slot(i + r * Step);
}
template <int Step>
SN_DEVICE Complex& point(float* data, int i, int r) {
  return reinterpret_cast<Complex*>(
      data)[Step % 8 == 0 ? i + (i >> 3) + r * (Step + Step / 8) : i + r * Step + ((i + r * Step) >> 3)];
}

// Whether t + i * Threads < Limit; known at compile time for all i but the last.
template <int Limit, int Threads>
SN_DEVICE constexpr bool inside(int t, int i) {
  return (i + 1) * Threads <= Limit || t + i * Threads < Limit;
}

// Discrete Fourier transform of R points in natural order, sign -1.
template <int R>
SN_DEVICE void small_dft(Complex* z) {
  if constexpr (R == 2) {
    const Complex a = z[0], b = z[1];
    z[0] = a + b, z[1] = a - b;
  } else if constexpr (R == 4) {
    const Complex a = z[0] + z[2], b = z[0] - z[2], c = z[1] + z[3], d = times_i(z[3] - z[1]);
    z[0] = a + c, z[1] = b + d, z[2] = a - c, z[3] = b - d;
  } else {
    static_assert(R == 8, "radix 2, 4 or 8");
    Complex even[4] = {z[0], z[2], z[4], z[6]}, odd[4] = {z[1], z[3], z[5], z[7]};
    small_dft<4>(even);
    small_dft<4>(odd);
    constexpr float h = 0.70710678f;
    odd[1] = {(odd[1].re + odd[1].im) * h, (odd[1].im - odd[1].re) * h};
    odd[2] = {odd[2].im, -odd[2].re};
    odd[3] = {(odd[3].im - odd[3].re) * h, -((odd[3].re + odd[3].im) * h)};
SN_UNROLL
    for (int i = 0; i < 4; ++i) z[i] = even[i] + odd[i], z[i + 4] = even[i] - odd[i];
  }
}

// Twiddle factors are in the order in which passes use them, so that adjacent threads read adjacent
// words: ops/launch.py, twiddles().
template <int N, int T, int L = N>
class RealFft {
 public:
  static constexpr int kPoints = N / 2;
  static constexpr int kLength = L / 2;                    // points of a span
  static constexpr int kPost = kLength - 8;                // where exp(-2 pi i k / L) begins
  static constexpr int kTurn = kPost + kLength / 2 + 1;    // where exp(-i pi k / (2 L)) begins
  static constexpr int kPairs = (kPoints / 2 + T) / T;     // bin pairs per thread
  using Points = PerThread<Complex, 8, T>;

  // The point that is the r-th input of butterfly b in a pass of radix R.
  template <int R>
  SN_DEVICE static constexpr int place(int b, int r) {
    constexpr int step = kLength / R;
    return L == N ? b + r * step : b / step * kLength + b % step + r * step;
  }

  // z := DFT, with sign -1, of the points place<8>(b, r), as returned by read(b, r), which may use
  // `data`.
  template <bool FromData, typename Read>
  SN_DEVICE static void transform(const Block<T>& block, float* data, const Complex* twiddles,
                                  Read read) {
    Points held;
    if (FromData) {
      block.each([&](int t) { gather<8>(t, held, read); });
      block.each([&](int t) { scatter<8, 1>(t, held, data, twiddles); });
    } else {
      block.each([&](int t) {
        gather<8>(t, held, read);
        scatter<8, 1>(t, held, data, twiddles);
      });
    }
    passes<8>(block, data, twiddles, held);
  }

  // Computes the spectrum of the real vector whose pairs were transformed, in place: bins 0..N/2.
  SN_DEVICE static void separate(const Block<T>& block, float* data, const Complex* twiddles,
                                 float scale) {
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const int k = t + i * T;
        if (!inside<kPoints / 2 + 1, T>(t, i)) continue;
        const auto [low, high] = bin_pair(data, twiddles, scale, k);
        point(data, k) = low;
        point(data, kPoints - k) = high;
      }
    });
  }

  struct Pair {
    Complex low, high;
  };

  // The same for all spans, whose two real bins become one: bin k of span q is q * kLength + k.
  SN_DEVICE static void separate_spans(const Block<T>& block, float* data, const Complex* twiddles,
                                       float scale) {
    block.each([&](int t) {
      for (int i = t; i < kPoints / 2; i += T) {
        const int k = i % (kLength / 2);
        float* own = data + 2 * (i / (kLength / 2)) * (kLength + kLength / 8);
        if (k) {
          const auto [low, high] = bin_pair(own, twiddles, scale, k);
          point(own, k) = low;
          point(own, kLength - k) = high;
          continue;
        }
        const auto [first, last] = bin_pair(own, twiddles, scale, 0);
        point(own, kLength / 2) = bin_pair(own, twiddles, scale, kLength / 2).low;
        if (i == 0)
          point(data, 0) = first, point(data, kPoints) = last;
        else
          point(own, 0) = {first.re * 0.70710678f, last.re * 0.70710678f};
      }
    });
  }

  SN_DEVICE static void join_spans(const Block<T>& block, float* data, const Complex* twiddles,
                                   float scale) {
    block.each([&](int t) {
      for (int i = t; i < kPoints / 2; i += T) {
        const int k = i % (kLength / 2);
        float* own = data + 2 * (i / (kLength / 2)) * (kLength + kLength / 8);
        if (k) {
          const auto [low, high] =
              point_pair(point(own, k), point(own, kLength - k), twiddles, scale, k);
          point(own, k) = low;
          point(own, kLength - k) = high;
          continue;
        }
        const Complex middle = point(own, kLength / 2), edges = scaled(point(own, 0), 1.41421356f);
        const Complex first = i ? Complex{edges.re, 0.0f} : point(data, 0);
        const Complex last = i ? Complex{edges.im, 0.0f} : point(data, kPoints);
        point(own, 0) = point_pair(first, last, twiddles, scale, 0).low;
        point(own, kLength / 2) = point_pair(middle, middle, twiddles, scale, kLength / 2).low;
      }
    });
  }

  // Computes bins k and L/2 - k from points k and L/2 - k of a span that starts at `data`.
  SN_DEVICE static Pair bin_pair(float* data, const Complex* twiddles, float scale, int k) {
    if (k == 0) {
      const Complex z = scaled(point(data, 0), scale);
      return {{z.re + z.im, 0.0f}, {z.re - z.im, 0.0f}};
    }
    const Complex a = point(data, k), b = conjugate(point(data, kLength - k));
    const Complex even = scaled(a + b, 0.5f * scale);
    const Complex odd = scaled(times_i(b - a), 0.5f * scale) * twiddles[kPost + k];
    return {even + odd, conjugate(even - odd)};
  }

  // Computes points k and L/2 - k from the bins; swapped, so that a transform with sign -1 inverts.
  SN_DEVICE static Pair point_pair(Complex low, Complex high, const Complex* twiddles, float scale,
                                   int k) {
    if (k == 0) {  // imaginary parts of the first and last bin do not exist
      const float a = low.re * scale, b = high.re * scale;
      return {swapped({a + b, a - b}), {}};
    }
    const Complex other = conjugate(high);
    const Complex even = scaled(low + other, scale);
    const Complex turned = times_i(scaled(low - other, scale) * conjugate(twiddles[kPost + k]));
    return {swapped(even + turned), swapped(conjugate(even - turned))};
  }

 private:
  template <int R, typename Read>
  SN_DEVICE static void gather(int t, Points& held, Read read) {
    constexpr int kEach = (kPoints / R + T - 1) / T;
SN_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int b = t + i * T;
      if (!inside<kPoints / R, T>(t, i)) continue;
SN_UNROLL
      for (int r = 0; r < R; ++r) held(t, i * R + r) = read(b, r);
    }
  }

  template <int R, int Stride>
  SN_DEVICE static void scatter(int t, Points& held, float* data, const Complex* twiddles) {
    constexpr int kEach = (kPoints / R + T - 1) / T;
SN_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int b = t + i * T, c = L == N ? b : b % (kLength / R), j = c % Stride;
      if (!inside<kPoints / R, T>(t, i)) continue;
      Complex z[R];
SN_UNROLL
      for (int r = 0; r < R; ++r) {
        z[r] = held(t, i * R + r);
        if (Stride > 1 && r) z[r] = z[r] * twiddles[Stride - 8 + (r - 1) * Stride + j];
      }
      small_dft<R>(z);
      const int to = (b - c) * R + c / Stride * Stride * R + j;
SN_UNROLL
      for (int r = 0; r < R; ++r)
        if (Stride == 1 && R == 8)
          reinterpret_cast<Complex*>(data)[to + (to >> 3) + r] = z[r];
        else
          point<Stride>(data, to, r) = z[r];
    }
  }

  template <int Stride>
  SN_DEVICE static void passes(const Block<T>& block, float* data, const Complex* twiddles,
                               Points& held) {
    if constexpr (Stride < kLength) {
      constexpr int kRadix = kLength / Stride < 8 ? kLength / Stride : 8;
      block.each([&](int t) { gather<kRadix>(t, held, [&](int b, int r) {
        return point<kLength / kRadix>(data, place<kRadix>(b, 0), r); }); });
      block.each([&](int t) { scatter<kRadix, Stride>(t, held, data, twiddles); });
      passes<Stride * kRadix>(block, data, twiddles, held);
    }
  }
};

// Walsh-Hadamard transform in place, with increasing strides: the same additions in the same order
// as ops/spectrum.py, hence the same bits.
template <int N, int T, int Stride = 1>
SN_DEVICE void hadamard(const Block<T>& block, float* data, float scale) {
  if constexpr (Stride < N) {
    constexpr int R = N / Stride < 16 ? N / Stride : 16;
    block.each([&](int t) {
      for (int b = t; b < N / R; b += T) {
        const int first = b / Stride * Stride * R + b % Stride;
        float v[R];
SN_UNROLL
        for (int r = 0; r < R; ++r) v[r] = data[slot<Stride>(first, r)];
SN_UNROLL
        for (int half = 1; half < R; half *= 2)
SN_UNROLL
          for (int r = 0; r < R; ++r)
            if (!(r & half)) {
              const float a = v[r], c = v[r | half];
              v[r] = a + c, v[r | half] = a - c;
            }
SN_UNROLL
        for (int r = 0; r < R; ++r)
          data[slot<Stride>(first, r)] = Stride * R == N ? v[r] * scale : v[r];
      }
    });
    hadamard<N, T, Stride * R>(block, data, scale);
  }
}

// Computes the DCT-II from the transformed pairs, in place: coefficient k in element k. `scale` is
// sqrt(1 / N); coefficients after the first have an additional factor of sqrt(2).
template <int N, int T>
SN_DEVICE void dct_from_points(const Block<T>& block, float* data, const Complex* twiddles,
                               float scale) {
  using Fft = RealFft<N, T>;
  constexpr int P = N / 2;
  PerThread<typename Fft::Pair, Fft::kPairs, T> held;
  block.each([&](int t) {
SN_UNROLL
    for (int i = 0; i < Fft::kPairs; ++i)
      if (const int k = t + i * T; k <= P / 2)
        held(t, i) = Fft::bin_pair(data, twiddles, k ? 1.41421356f * scale : scale, k);
  });
  block.each([&](int t) {
SN_UNROLL
    for (int i = 0; i < Fft::kPairs; ++i) {
      const int k = t + i * T;
      if (k > P / 2) continue;
      const auto [low, high] = held(t, i);
      if (k == 0) {
        data[slot(0)] = low.re;
        data[slot(P)] = high.re;  // times sqrt(2) * cos(pi / 4)
        continue;
      }
      const Complex a = low * twiddles[Fft::kTurn + k], b = high * twiddles[Fft::kTurn + P - k];
      data[slot(k)] = a.re, data[slot(N - k)] = -a.im;
      data[slot(P - k)] = b.re, data[slot(P + k)] = -b.im;
    }
  });
}

// Computes the points whose swapped transform with sign -1 is the reordered elements, in place.
template <int N, int T>
SN_DEVICE void points_from_dct(const Block<T>& block, float* data, const Complex* twiddles,
                               float scale) {
  using Fft = RealFft<N, T>;
  constexpr int P = N / 2;
  PerThread<typename Fft::Pair, Fft::kPairs, T> held;
  block.each([&](int t) {
SN_UNROLL
    for (int i = 0; i < Fft::kPairs; ++i) {
      const int k = t + i * T;
      if (k > P / 2) continue;
      if (k == 0) {
        held(t, i) = Fft::point_pair({data[slot(0)], 0.0f}, {data[slot(P)], 0.0f}, twiddles,
                                     scale, 0);
        continue;
      }
      const Complex low = {data[slot(k)], -data[slot(N - k)]};
      const Complex high = {data[slot(P - k)], -data[slot(P + k)]};
      held(t, i) = Fft::point_pair(low * conjugate(twiddles[Fft::kTurn + k]),
                                   high * conjugate(twiddles[Fft::kTurn + P - k]), twiddles,
                                   0.70710678f * scale, k);
    }
  });
  block.each([&](int t) {
SN_UNROLL
    for (int i = 0; i < Fft::kPairs; ++i) {
      const int k = t + i * T;
      if (k > P / 2) continue;
      const auto [low, high] = held(t, i);
      point(data, k) = low;
      if (k) point(data, P - k) = high;
    }
  });
}

}  // namespace sn
