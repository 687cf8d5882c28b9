// Loops that the compiler vectorizes, once per instruction set, chosen at load time.
//
// Every loop is bit-identical on every instruction set: integers, or floats combined element by
// element. For the same reason, sums of floats use 64 partial sums in a fixed order.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SN_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define SN_CLONES
#endif

namespace sn {

// Four floats; and a selection of four from two of these: 0 to 3 are from `a`, 4 to 7 from `b`.
typedef float Quarter __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SN_PICK(a, b, w, x, y, z) __builtin_shufflevector(a, b, w, x, y, z)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SN_PICK(a, b, w, x, y, z) __builtin_shuffle(a, b, Places{w, x, y, z})
#endif

}  // namespace sn
