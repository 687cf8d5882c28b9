// Discrete Fourier transforms of 2, 3, 4, 5 and 8 points, sign -1, in natural order.
//
// Additions and products in a fixed order, none of them fused. Named members and no arrays: those
// would keep the compiler from vector code.
#pragma once

// Into every clone of the loop that has it.
#define SN_INSIDE __attribute__((always_inline))
// Before a loop whose stores go nowhere that it reads, which the compiler cannot see.
#if defined(__GNUC__) && !defined(__clang__)
#define SN_APART _Pragma("GCC ivdep")
#else
#define SN_APART _Pragma("clang loop vectorize(assume_safety)")
#endif

namespace sn {

struct Complex {
  float re, im;
};

SN_INSIDE inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
SN_INSIDE inline Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
SN_INSIDE inline Complex operator*(Complex a, Complex b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
SN_INSIDE inline Complex operator*(float a, Complex b) { return {a * b.re, a * b.im}; }
SN_INSIDE inline Complex down(Complex a) { return {a.im, -a.re}; }  // times -i

struct Two {
  Complex a, b;
};
struct Three {
  Complex a, b, c;
};
struct Four {
  Complex a, b, c, d;
};
struct Five {
  Complex a, b, c, d, e;
};
struct Eight {
  Four low, high;
};

SN_INSIDE inline Two dft(Complex a, Complex b) { return {a + b, a - b}; }

SN_INSIDE inline Three dft(Complex a, Complex b, Complex c) {
  constexpr float sine = 0.8660254f;  // of a third of a turn
  const Complex sum = b + c, middle = a - 0.5f * sum, turned = down(sine * (b - c));
  return {a + sum, middle + turned, middle - turned};
}

SN_INSIDE inline Four dft(Complex a, Complex b, Complex c, Complex d) {
  const Two even = dft(a, c), odd = dft(b, d);
  const Complex turned = down(odd.b);
  return {even.a + odd.a, even.b + turned, even.a - odd.a, even.b - turned};
}

SN_INSIDE inline Five dft(Complex a, Complex b, Complex c, Complex d, Complex e) {
  // Cosines and sines of one and two fifths of a turn.
  constexpr float c1 = 0.309017f, c2 = -0.809017f, s1 = 0.95105654f, s2 = 0.58778524f;
  const Two outer = dft(b, e), inner = dft(c, d);
  const Complex near = (a + c1 * outer.a) + c2 * inner.a, far = (a + c2 * outer.a) + c1 * inner.a;
  const Complex once = down(s1 * outer.b + s2 * inner.b), twice = down(s2 * outer.b - s1 * inner.b);
  return {(a + outer.a) + inner.a, near + once, far + twice, far - twice, near - once};
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

}  // namespace sn
