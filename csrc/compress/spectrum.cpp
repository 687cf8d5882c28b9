#include "spectrum.h"

#include <cmath>
#include <cstring>

#include "lanes.h"

// Inlines a function into every clone of the loop that calls it.
#define SN_INSIDE __attribute__((always_inline))
// For loops whose stores do not alias their loads, which the compiler cannot prove.
#if defined(__GNUC__) && !defined(__clang__)
#define SN_APART _Pragma("GCC ivdep")
#else
#define SN_APART _Pragma("clang loop vectorize(assume_safety)")
#endif

namespace sn {
namespace {

// Discrete Fourier transforms of 2, 4 and 8 points, sign -1, in natural order. Additions and
// products in a fixed order, none of them fused. Named members, as arrays would keep the compiler
// from vectorizing.
struct Complex {
  float re, im;
};

SN_INSIDE inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
SN_INSIDE inline Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
SN_INSIDE inline Complex operator*(Complex a, Complex b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
SN_INSIDE inline Complex down(Complex a) { return {a.im, -a.re}; }  // times -i

struct Two {
  Complex a, b;
};
struct Four {
  Complex a, b, c, d;
};
struct Eight {
  Four low, high;
};

SN_INSIDE inline Two dft(Complex a, Complex b) { return {a + b, a - b}; }

SN_INSIDE inline Four dft(Complex a, Complex b, Complex c, Complex d) {
  const Two even = dft(a, c), odd = dft(b, d);
  const Complex turned = down(odd.b);
  return {even.a + odd.a, even.b + turned, even.a - odd.a, even.b - turned};
}

SN_INSIDE inline Eight dft(const Four& low, const Four& high) {
  constexpr float h = 0.70710678f;
  const Four even = dft(low.a, low.c, high.a, high.c), odd = dft(low.b, low.d, high.b, high.d);
  const Complex b = {(odd.b.re + odd.b.im) * h, (odd.b.im - odd.b.re) * h};
  const Complex c = down(odd.c);
  const Complex d = {(odd.d.im - odd.d.re) * h, (odd.d.re + odd.d.im) * -h};
  return {{even.a + odd.a, even.b + b, even.c + c, even.d + d},
          {even.a - odd.a, even.b - b, even.c - c, even.d - d}};
}

constexpr int64_t kApart = 16;  // floats between the parts: for a last bin, and other cache sets

template <typename From>
SN_INSIDE inline Eight dft8(From from, int64_t at, int64_t step) {
  return dft({from(at), from(at + step), from(at + 2 * step), from(at + 3 * step)},
             {from(at + 4 * step), from(at + 5 * step), from(at + 6 * step), from(at + 7 * step)});
}

template <typename To>
SN_INSIDE inline void put8(const Eight& z, To to, int64_t at, int64_t step) {
  to(at, z.low.a), to(at + step, z.low.b), to(at + 2 * step, z.low.c), to(at + 3 * step, z.low.d);
  to(at + 4 * step, z.high.a), to(at + 5 * step, z.high.b);
  to(at + 6 * step, z.high.c), to(at + 7 * step, z.high.d);
}

// Multiplies all but the first by their roots: real part at [2 k m], imaginary at [(2 k + 1) m].
SN_INSIDE inline Eight turned(const Eight& z, const float* roots, int64_t m) {
  const auto root = [=](int64_t k) SN_INSIDE {
    return Complex{roots[2 * k * m], roots[(2 * k + 1) * m]};
  };
  return {{z.low.a, z.low.b * root(0), z.low.c * root(1), z.low.d * root(2)},
          {z.high.a * root(3), z.high.b * root(4), z.high.c * root(5), z.high.d * root(6)}};
}

// Self-sorting passes (Stockham). In each, `stride` interleaved transforms of 8 m points become
// eight times as many of m points.

// The first: m adjacent butterflies, each with its own roots. The input is real and imaginary
// parts, or the pairs of a real vector, in `re`.
template <bool pairs>
SN_CLONES void first_pass(const float* __restrict re, const float* __restrict im,
                          float* __restrict to_re, float* __restrict to_im,
                          const float* __restrict roots, int64_t m) {
  const auto from = [=](int64_t i) SN_INSIDE {
    return pairs ? Complex{re[2 * i], re[2 * i + 1]} : Complex{re[i], im[i]};
  };
  const auto to = [=](int64_t i, Complex z) SN_INSIDE { to_re[i] = z.re, to_im[i] = z.im; };
  for (int64_t p = 0; p < m; ++p) put8(turned(dft8(from, p, m), roots + p, m), to, 8 * p, 1);
}

// A later one: `stride` adjacent butterflies share their roots.
SN_CLONES void next_pass(const float* __restrict re, const float* __restrict im,
                         float* __restrict to_re, float* __restrict to_im, const float* roots,
                         int64_t m, int64_t stride) {
  const auto from = [=](int64_t i) SN_INSIDE { return Complex{re[i], im[i]}; };
  const auto to = [=](int64_t i, Complex z) SN_INSIDE { to_re[i] = z.re, to_im[i] = z.im; };
  for (int64_t p = 0; p < m; ++p) {
    const int64_t at = stride * p;
    if (stride == 8)  // a separate loop of constant length, so that it is vectorized
SN_APART
      for (int64_t q = 0; q < 8; ++q)
        put8(turned(dft8(from, at + q, 8 * m), roots + p, m), to, 8 * at + q, 8);
    else
SN_APART
      for (int64_t q = 0; q < stride; ++q)
        put8(turned(dft8(from, at + q, stride * m), roots + p, m), to, 8 * at + q, stride);
  }
}

// The last: `count` transforms of 2, 4 or 8 points, without roots.
template <typename From, typename To>
SN_INSIDE inline void ends(From from, To to, int64_t radix, int64_t count) {
  if (radix == 8) {
SN_APART
    for (int64_t q = 0; q < count; ++q) put8(dft8(from, q, count), to, q, count);
  } else if (radix == 4) {
SN_APART
    for (int64_t q = 0; q < count; ++q) {
      const Four z = dft(from(q), from(q + count), from(q + 2 * count), from(q + 3 * count));
      to(q, z.a), to(q + count, z.b), to(q + 2 * count, z.c), to(q + 3 * count, z.d);
    }
  } else {
SN_APART
    for (int64_t q = 0; q < count; ++q) {
      const Two z = dft(from(q), from(q + count));
      to(q, z.a), to(q + count, z.b);
    }
  }
}

// Writes real and imaginary parts; or, with `pairs`, the scaled pairs of a real vector to `to_re`,
// with the parts swapped, which turns a transform with sign -1 into one with sign +1.
template <bool pairs>
SN_CLONES void last_pass(const float* __restrict re, const float* __restrict im,
                         float* __restrict to_re, float* __restrict to_im, float scale,
                         int64_t radix, int64_t count) {
  const auto from = [=](int64_t i) SN_INSIDE { return Complex{re[i], im[i]}; };
  const auto to = [=](int64_t i, Complex z) SN_INSIDE {
    if (pairs)
      to_re[2 * i] = z.im * scale, to_re[2 * i + 1] = z.re * scale;
    else
      to_re[i] = z.re, to_im[i] = z.im;
  };
  ends(from, to, radix, count);
}

SN_CLONES void split(const float* __restrict bins, float* __restrict re, float* __restrict im,
                     int64_t count) {
  for (int64_t k = 0; k < count; ++k) re[k] = bins[2 * k], im[k] = bins[2 * k + 1];
}

// Spans: point k of span q is at [k * side + q], so that all spans use the same root.

constexpr float kDown = 0.70710678f, kUp = 1.41421356f;  // an edge bin counts once, others twice

SN_INSIDE inline Quarter load(const float* at) {
  Quarter four;
  std::memcpy(&four, at, sizeof four);
  return four;
}

SN_INSIDE inline void store(Quarter four, float* at) { std::memcpy(at, &four, sizeof four); }

struct Tile {
  Quarter a, b, c, d;
};

SN_INSIDE inline Tile transposed(const Tile& t) {
  const Quarter ab = SN_PICK(t.a, t.b, 0, 4, 1, 5), cd = SN_PICK(t.c, t.d, 0, 4, 1, 5);
  const Quarter after_ab = SN_PICK(t.a, t.b, 2, 6, 3, 7), after_cd = SN_PICK(t.c, t.d, 2, 6, 3, 7);
  return {SN_PICK(ab, cd, 0, 1, 4, 5), SN_PICK(ab, cd, 2, 3, 6, 7),
          SN_PICK(after_ab, after_cd, 0, 1, 4, 5), SN_PICK(after_ab, after_cd, 2, 3, 6, 7)};
}

// Both work in tiles of four spans by four points, if there are that many: element by element, a
// strided pass over memory took three times as long.
SN_CLONES void side_by_side(const float* __restrict pairs, float* __restrict re,
                            float* __restrict im, int64_t points, int64_t side) {
  const int64_t tiled = side & -4;
  for (int64_t k = 0; k < points; k += 4)
    for (int64_t q = 0; q < tiled; q += 4) {
      const float* from = pairs + 2 * (q * points + k);
      const auto half = [=](int64_t span) SN_INSIDE { return from + 2 * span * points; };
      const Quarter a = load(half(0)), b = load(half(0) + 4), c = load(half(1)), d = load(half(1) + 4);
      const Quarter e = load(half(2)), f = load(half(2) + 4), g = load(half(3)), h = load(half(3) + 4);
      const Tile real = transposed({SN_PICK(a, b, 0, 2, 4, 6), SN_PICK(c, d, 0, 2, 4, 6),
                                    SN_PICK(e, f, 0, 2, 4, 6), SN_PICK(g, h, 0, 2, 4, 6)});
      const Tile imaginary = transposed({SN_PICK(a, b, 1, 3, 5, 7), SN_PICK(c, d, 1, 3, 5, 7),
                                         SN_PICK(e, f, 1, 3, 5, 7), SN_PICK(g, h, 1, 3, 5, 7)});
      float *const to_re = re + k * side + q, *const to_im = im + k * side + q;
      store(real.a, to_re), store(imaginary.a, to_im);
      store(real.b, to_re + side), store(imaginary.b, to_im + side);
      store(real.c, to_re + 2 * side), store(imaginary.c, to_im + 2 * side);
      store(real.d, to_re + 3 * side), store(imaginary.d, to_im + 3 * side);
    }
  for (int64_t q = tiled; q < side; ++q)
    for (int64_t k = 0; k < points; ++k)
      re[k * side + q] = pairs[2 * (q * points + k)],
                    im[k * side + q] = pairs[2 * (q * points + k) + 1];
}

SN_CLONES void in_turn(const float* __restrict re, const float* __restrict im,
                       float* __restrict pairs, int64_t points, int64_t side) {
  const int64_t tiled = side & -4;
  for (int64_t q = 0; q < tiled; q += 4)
    for (int64_t k = 0; k < points; k += 4) {
      const auto tile = [=](const float* part) SN_INSIDE {
        const float* from = part + k * side + q;
        return transposed({load(from), load(from + side), load(from + 2 * side), load(from + 3 * side)});
      };
      const Tile real = tile(re), imaginary = tile(im);
      float* const to = pairs + 2 * (q * points + k);
      const auto put = [=](int64_t span, Quarter x, Quarter y) SN_INSIDE {
        store(SN_PICK(x, y, 0, 4, 1, 5), to + 2 * span * points);
        store(SN_PICK(x, y, 2, 6, 3, 7), to + 2 * span * points + 4);
      };
      put(0, real.a, imaginary.a), put(1, real.b, imaginary.b);
      put(2, real.c, imaginary.c), put(3, real.d, imaginary.d);
    }
  for (int64_t q = tiled; q < side; ++q)
    for (int64_t k = 0; k < points; ++k)
      pairs[2 * (q * points + k)] = re[k * side + q],
                             pairs[2 * (q * points + k) + 1] = im[k * side + q];
}

SN_CLONES void scaled(float* parts, float scale, int64_t count) {
  for (int64_t k = 0; k < count; ++k) parts[k] *= scale;
}

// Computes the vector's transform from that of its pairs, z, which is the transform of the even
// elements plus i times that of the odd ones. For spans, two edge bins become one complex number,
// and bins are written as real and imaginary parts; for a single span, as pairs to `to_re`.
template <bool spans>
SN_CLONES void separate(const float* __restrict re, const float* __restrict im,
                        const float* __restrict cosines, const float* __restrict sines,
                        float scale, float* __restrict to_re, float* __restrict to_im,
                        int64_t points, int64_t number) {
  const float half = 0.5f * scale;
  const int64_t side = spans ? number : 1;
  for (int64_t k = 1; k < points; ++k) {
    const float cosine = cosines[k], sine = sines[k];
SN_APART
    for (int64_t q = 0; q < side; ++q) {
      const int64_t at = k * side + q, back = (points - k) * side + q;
      const float a = re[at], b = im[at], c = re[back], d = im[back];
      const float up = b + d, over = c - a;
      (spans ? to_re[at] : to_re[2 * k]) = ((a + c) + (cosine * up - sine * over)) * half;
      (spans ? to_im[at] : to_re[2 * k + 1]) = ((b - d) + (cosine * over + sine * up)) * half;
    }
  }
  for (int64_t q = 0; q < side; ++q) {
    const float sum = (re[q] + im[q]) * scale, difference = (re[q] - im[q]) * scale;
    if (spans) {
      const float factor = q ? kDown : 1.0f;
      to_re[q] = sum * factor, to_im[q] = difference * factor;
    } else {
      to_re[0] = sum, to_re[1] = 0;
      to_re[2 * points] = difference, to_re[2 * points + 1] = 0;
    }
  }
}

// Inverts `separate` for each span, times two, from split bins, which have one row more than there
// are points; the unused parts of the edges must be zero.
template <bool spans>
SN_CLONES void join(const float* __restrict re, const float* __restrict im,
                    const float* __restrict cosines, const float* __restrict sines,
                    float* __restrict to_re, float* __restrict to_im, int64_t points,
                    int64_t number) {
  const int64_t side = spans ? number : 1;
  for (int64_t k = 0; k < points; ++k) {
    const float cosine = cosines[k], sine = sines[k];
SN_APART
    for (int64_t i = 0; i < side; ++i) {
      const int64_t at = k * side + i, back = (points - k) * side + i;
      const float p = re[at], q = im[at], r = re[back], s = im[back];
      const float right = p - r, up = q + s;
      to_re[at] = (p + r) - (cosine * up - sine * right);
      to_im[at] = (q - s) + (cosine * right + sine * up);
    }
  }
}

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

Fourier::Fourier(int64_t block, int64_t span, const float* roots)
    : points_(span / 2),
      side_(block / span),
      scale_(static_cast<float>(1 / std::sqrt(static_cast<double>(span)))),
      roots_(roots),
      scratch_(4 * (side_ * (points_ + 1) + kApart)) {}

int64_t Fourier::roots_of(int64_t span) {
  int64_t count = span;
  for (int64_t left = span / 2; left > 8; left /= 8) count += 14 * (left / 8);
  return count;
}

Fourier::Parts Fourier::scratch(int which) {
  const int64_t apart = side_ * (points_ + 1) + kApart;
  float* re = scratch_.data() + 2 * which * apart;
  return {re, re + apart};
}

int Fourier::middle(int64_t& radix) {
  int at = 0;
  const float* roots = roots_ + 2 * points_ + 14 * (points_ / 8);
  for (radix = points_ / 8; radix > 8; radix /= 8) {
    const Parts from = scratch(at), to = scratch(1 - at);
    next_pass(from.re, from.im, to.re, to.im, roots, radix / 8, side_ * (points_ / radix));
    roots += 14 * (radix / 8);
    at = 1 - at;
  }
  return at;
}

void Fourier::forward_spans(const float* values, float* bins) {
  const Parts first = scratch(0), second = scratch(1);
  side_by_side(values, second.re, second.im, points_, side_);
  next_pass(second.re, second.im, first.re, first.im, roots_ + 2 * points_, points_ / 8, side_);
  int64_t radix;
  const int at = middle(radix);
  const Parts from = scratch(at), to = scratch(1 - at);
  last_pass<false>(from.re, from.im, to.re, to.im, 1, radix, side_ * (points_ / radix));
  separate<true>(to.re, to.im, roots_, roots_ + points_, scale_, from.re, from.im, points_, side_);
  const int64_t block = 2 * points_ * side_;
  const float last = from.im[0];
  from.im[0] = 0;
  in_turn(from.re, from.im, bins, points_, side_);
  bins[block] = last, bins[block + 1] = 0;
}

void Fourier::inverse_spans(const float* bins, float* values) {
  const Parts first = scratch(0), second = scratch(1);
  side_by_side(bins, first.re, first.im, points_, side_);
  float* const ends = first.re + points_ * side_;
  for (int64_t q = 0; q < side_; ++q) {
    ends[q] = q ? first.im[q] * kUp : bins[2 * points_ * side_];
    if (q) first.re[q] *= kUp;
    first.im[q] = first.im[points_ * side_ + q] = 0;
  }
  join<true>(first.re, first.im, roots_, roots_ + points_, second.re, second.im, points_, side_);
  // Real and imaginary parts are swapped, as in last_pass<true>.
  next_pass(second.im, second.re, first.re, first.im, roots_ + 2 * points_, points_ / 8, side_);
  int64_t radix;
  const int at = middle(radix);
  const Parts from = scratch(at), to = scratch(1 - at);
  const int64_t count = points_ * side_;
  last_pass<false>(from.re, from.im, to.re, to.im, 1, radix, count / radix);
  scaled(to.re, scale_, count), scaled(to.im, scale_, count);
  in_turn(to.im, to.re, values, points_, side_);
}

void Fourier::forward(const float* values, float* bins) {
  if (side_ > 1) return forward_spans(values, bins);
  const Parts first = scratch(0);
  first_pass<true>(values, nullptr, first.re, first.im, roots_ + 2 * points_, points_ / 8);
  int64_t radix;
  const int at = middle(radix);
  const Parts from = scratch(at), to = scratch(1 - at);
  last_pass<false>(from.re, from.im, to.re, to.im, 1, radix, points_ / radix);
  separate<false>(to.re, to.im, roots_, roots_ + points_, scale_, bins, nullptr, points_, 1);
}

void Fourier::inverse(const float* bins, float* values) {
  if (side_ > 1) return inverse_spans(bins, values);
  const Parts first = scratch(0), second = scratch(1);
  split(bins, first.re, first.im, points_ + 1);
  first.im[0] = first.im[points_] = 0;
  join<false>(first.re, first.im, roots_, roots_ + points_, second.re, second.im, points_, 1);
  first_pass<false>(second.im, second.re, first.re, first.im, roots_ + 2 * points_, points_ / 8);
  int64_t radix;
  const Parts from = scratch(middle(radix));
  last_pass<true>(from.re, from.im, values, nullptr, scale_, radix, points_ / radix);
}

void hadamard(float* rows, int64_t count, int64_t block) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t i = 0; i < count; ++i) butterflies(rows + i * block, block, scale);
}

}  // namespace sn
