// Loops the compiler turns into vector code, once per instruction set, chosen at load time.
//
// Every loop gives the same bits on every instruction set: integers, or floats combined element
// by element. Sums of floats keep 64 partial sums in a fixed order for the same reason.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SN_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define SN_CLONES
#endif

namespace sn {

// Four floats; and four of those of two such: 0 to 3 are of `a`, 4 to 7 of `b`.
typedef float Quarter __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SN_PICK(a, b, w, x, y, z) __builtin_shufflevector(a, b, w, x, y, z)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SN_PICK(a, b, w, x, y, z) __builtin_shuffle(a, b, Places{w, x, y, z})
#endif

}  // namespace sn
