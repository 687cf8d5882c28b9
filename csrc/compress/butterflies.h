// Discrete Fourier transforms of 2, 4 and 8 points, sign -1, in natural order.
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

}  // namespace sn
