// Loops the compiler turns into vector code, once per instruction set, chosen at load time.
//
// Every loop gives the same bits on every instruction set: integers, or floats combined element
// by element. Sums of floats keep 64 partial sums in a fixed order for the same reason.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define SN_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define SN_CLONES
#endif
