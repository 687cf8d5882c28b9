// A block of threads: barriers, collectives and atomics, on CUDA and on the host.
//
// A kernel is a sequence of sections. block.each(body) runs body(thread) for every thread and ends
// with a barrier; values a thread keeps between sections are stored in a PerThread. On CUDA a
// section is the body and __syncthreads(), on the host a loop over the threads, so g++ compiles and
// runs the same kernels (docs/decisions/0071). Two rules follow:
//   - inside a section, threads access each other's data only through the atomics here; the host
//     runs the threads in three orders, and a test requires equal bytes;
//   - outside the sections, every thread runs the same code on the same values. A shared word read
//     there must not be written by the next section.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(i64) == 8, "as the format says");

#ifdef __CUDACC__
#define SN_DEVICE __device__ __forceinline__
#define SN_UNROLL _Pragma("unroll")
#else
#define SN_HOST 1
#define SN_DEVICE inline
#define SN_UNROLL
#include <cmath>
#include <cstring>
#endif

namespace sn {

#ifdef SN_HOST

SN_DEVICE u32 bits_of(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
SN_DEVICE float float_of(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
SN_DEVICE int count_ones(u32 bits) { return __builtin_popcount(bits); }
SN_DEVICE int lowest_one(u32 bits) { return __builtin_ctz(bits); }
SN_DEVICE float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

template <typename T>
SN_DEVICE T atomic_add(T* where, T value) {
  const T before = *where;
  *where = before + value;
  return before;
}
template <typename T>
SN_DEVICE void atomic_or(T* where, T value) {
  *where |= value;
}
template <typename T>
SN_DEVICE void atomic_xor(T* where, T value) {
  *where ^= value;
}

// The order in which the host runs the threads of a section.
enum class Order { kUp, kDown, kMixed };

template <typename T, int Count, int Threads>
class PerThread {
 public:
  // Poisoned: what a kernel fails to initialize is neither zero nor the previous block's value.
  PerThread() { std::memset(static_cast<void*>(values_), 0xFF, sizeof values_); }
  T& operator()(int thread, int i = 0) { return values_[thread][i]; }

 private:
  T values_[Threads][Count];
};

template <int Threads>
class Block {
 public:
  Block(i64 index, Order order) : index_(index), order_(order) {}
  i64 index() const { return index_; }

  template <typename Body>
  void each(Body body) const {
    for (int i = 0; i < Threads; ++i)
      body(order_ == Order::kUp     ? i
           : order_ == Order::kDown ? Threads - 1 - i
                                    : static_cast<int>((i * 37u + 11) % Threads));
  }

  // Exclusive or, and maximum, of a value per thread, stored in `cell`, which must be zero.
  template <typename Value>
  void parity(u32* cell, Value value) const {
    each([&](int t) { *cell ^= value(t); });
  }
  template <typename Value>
  void max(u32* cell, Value value) const {
    each([&](int t) {
      if (const u32 own = value(t); *cell < own) *cell = own;
    });
  }

  // Bit (i * Threads + t) of `map` := flag(t, i).
  template <int Count, typename Flag>
  void ballots(u32* map, Flag flag) const {
    for (int w = 0; w < Count * Threads / 32; ++w) map[w] = 0;
    each([&](int t) {
      for (int i = 0; i < Count; ++i)
        map[(i * Threads + t) >> 5] |= static_cast<u32>(flag(t, i)) << (t & 31);
    });
  }

  // before[w] := number of ones in map[0..w), for w up to `words`.
  void count_before(const u32* map, u32* before, int words) const {
    u32 seen = 0;
    for (int w = 0; w <= words; ++w) {
      before[w] = seen;
      if (w < words) seen += count_ones(map[w]);
    }
  }

  // The digit d with count(> d) < need <= count(>= d), by a histogram of `digits` counts.
  // cell := {d, count(> d), histogram[d]}
  void find_digit(const u32* histogram, int digits, u32 need, u32* cell) const {
    u32 above = 0;
    for (int d = digits - 1; d >= 0; --d) {
      if (above + histogram[d] >= need) {
        cell[0] = d, cell[1] = above, cell[2] = histogram[d];
        return;
      }
      above += histogram[d];
    }
  }

 private:
  i64 index_;
  Order order_;
};

#else  // CUDA

SN_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
SN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
SN_DEVICE int count_ones(u32 bits) { return __popc(bits); }
SN_DEVICE int lowest_one(u32 bits) { return __ffs(bits) - 1; }
SN_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

template <typename T>
SN_DEVICE T atomic_add(T* where, T value) {
  return atomicAdd(where, value);
}
template <typename T>
SN_DEVICE void atomic_or(T* where, T value) {
  atomicOr(where, value);
}
template <typename T>
SN_DEVICE void atomic_xor(T* where, T value) {
  atomicXor(where, value);
}

constexpr u32 kWarp = 0xFFFFFFFFu;

SN_DEVICE u32 warp_xor(u32 value) {
  for (int step = 16; step; step >>= 1) value ^= __shfl_xor_sync(kWarp, value, step);
  return value;
}
SN_DEVICE u32 warp_max(u32 value) {
  for (int step = 16; step; step >>= 1) {
    const u32 other = __shfl_xor_sync(kWarp, value, step);
    value = value < other ? other : value;
  }
  return value;
}
// Sum over the lanes below this one.
SN_DEVICE u32 warp_before(u32 value, int lane) {
  u32 total = value;
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(kWarp, total, step);
    if (lane >= step) total += other;
  }
  return total - value;
}

// Registers: every index is known after unrolling.
template <typename T, int Count, int Threads>
class PerThread {
 public:
  SN_DEVICE T& operator()(int, int i = 0) { return values_[i]; }

 private:
  T values_[Count];
};

template <int Threads>
class Block {
  static_assert(Threads % 32 == 0, "whole warps");

 public:
  SN_DEVICE i64 index() const { return blockIdx.x; }

  template <typename Body>
  SN_DEVICE void each(Body body) const {
    body(static_cast<int>(threadIdx.x));
    __syncthreads();
  }

  template <typename Value>
  SN_DEVICE void parity(u32* cell, Value value) const {
    const u32 total = warp_xor(value(static_cast<int>(threadIdx.x)));
    if ((threadIdx.x & 31) == 0) atomicXor(cell, total);
    __syncthreads();
  }
  template <typename Value>
  SN_DEVICE void max(u32* cell, Value value) const {
    const u32 largest = warp_max(value(static_cast<int>(threadIdx.x)));
    if ((threadIdx.x & 31) == 0) atomicMax(cell, largest);
    __syncthreads();
  }

  template <int Count, typename Flag>
  SN_DEVICE void ballots(u32* map, Flag flag) const {
    const int t = threadIdx.x;
    SN_UNROLL
    for (int i = 0; i < Count; ++i) {
      const u32 word = __ballot_sync(kWarp, flag(t, i));
      if ((t & 31) == 0) map[(i * Threads + t) >> 5] = word;
    }
    __syncthreads();
  }

  // One warp scans while the others wait. The arrays are short: 65 words for 2049 bins.
  SN_DEVICE void count_before(const u32* map, u32* before, int words) const {
    const int lane = threadIdx.x;
    if (lane < 32) {
      const int run = (words + 31) / 32, first = lane * run;
      const int last = first + run < words ? first + run : words;
      u32 own = 0;
      for (int w = first; w < last; ++w) own += count_ones(map[w]);
      u32 seen = warp_before(own, lane);
      for (int w = first; w < last; ++w) {
        before[w] = seen;
        seen += count_ones(map[w]);
      }
      if (lane == 31) before[words] = seen;
    }
    __syncthreads();
  }

  SN_DEVICE void find_digit(const u32* histogram, int digits, u32 need, u32* cell) const {
    const int lane = threadIdx.x;
    if (lane < 32) {
      const int run = digits / 32, top = digits - 1 - lane * run;  // lane 0 has the largest
      u32 own = 0;
      for (int i = 0; i < run; ++i) own += histogram[top - i];
      u32 above = warp_before(own, lane);
      if (above < need && need <= above + own) {
        int d = top;
        while (above + histogram[d] < need) above += histogram[d--];
        cell[0] = d, cell[1] = above, cell[2] = histogram[d];
      }
    }
    __syncthreads();
  }
};

#endif

}  // namespace sn
