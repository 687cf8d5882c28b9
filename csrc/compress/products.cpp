#include "products.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // no call passes wide vectors: everything is inlined

// Sums stay in registers only if everything is inlined and no loop over them remains. Sanitizers
// check every access: such code then takes ten times as long to compile, with no sum in a register.
#if defined(__SANITIZE_ADDRESS__)
#define SN_UNROLL
#define SN_INSIDE
#else
#define SN_UNROLL _Pragma("GCC unroll 16")
#define SN_INSIDE __attribute__((always_inline))
#endif
#define SN_INLINE SN_INSIDE inline

namespace sn {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kRows = 64;  // rows of a matrix processed while they are in the cache

// 16 floats in registers of Width: compilers emit slow code for vectors wider than the machine's.
template <int Width>
struct Lanes {
  typedef float Part __attribute__((vector_size(4 * Width)));
  static constexpr int kParts = kLanes / Width;
  Part parts[kParts];

  SN_INLINE void add(const Lanes& one, const Lanes& other) {
    SN_UNROLL for (int i = 0; i < kParts; ++i) parts[i] += one.parts[i] * other.parts[i];
  }
  SN_INLINE void subtract_from(const Lanes& other) {
    SN_UNROLL for (int i = 0; i < kParts; ++i) parts[i] = other.parts[i] - parts[i];
  }
  SN_INLINE void load(const float* at) {
    SN_UNROLL for (int i = 0; i < kParts; ++i)
      std::memcpy(&parts[i], at + i * Width, sizeof(Part));
  }
  SN_INLINE void store(float* at) const {
    SN_UNROLL for (int i = 0; i < kParts; ++i)
      std::memcpy(at + i * Width, &parts[i], sizeof(Part));
  }
  SN_INLINE void fill(float value) {
    SN_UNROLL for (int i = 0; i < kParts; ++i) parts[i] = Part{} + value;
  }
  // Adds lanes l, l + 8 and l + 4, l + 12, then these two sums: four lanes remain.
  SN_INLINE Quarter quarter() const {
    Quarter all[4];
    SN_UNROLL for (int i = 0; i < kParts; ++i) {
      const Part part = parts[i];
      std::memcpy(all + i * Width / 4, &part, sizeof part);
    }
    return (all[0] + all[2]) + (all[1] + all[3]);
  }
};

// Sums each of four sets of 16 lanes.
template <int Width>
SN_INLINE void fold(const Lanes<Width>* four, float* sums) {
  const Quarter a = four[0].quarter(), b = four[1].quarter(), c = four[2].quarter(),
                d = four[3].quarter();
  const Quarter ab = SN_PICK(a, b, 0, 1, 4, 5) + SN_PICK(a, b, 2, 3, 6, 7);
  const Quarter cd = SN_PICK(c, d, 0, 1, 4, 5) + SN_PICK(c, d, 2, 3, 6, 7);
  const Quarter all = SN_PICK(ab, cd, 0, 2, 4, 6) + SN_PICK(ab, cd, 1, 3, 5, 7);
  std::memcpy(sums, &all, sizeof all);
}

// Multiplies some rows by some directions; `factor` interleaves these, 16 numbers at a time.
template <int Width, int Rows, int Some>
SN_INLINE void rows_block(const float* const* rows, int64_t chunks, const float* rest,
                          const float* factor, float (*sums)[Rows]) {
  Lanes<Width> total[Some][Rows] = {};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    Lanes<Width> row[Rows], direction;
    SN_UNROLL for (int i = 0; i < Rows; ++i) row[i].load(rows[i] + chunk * kLanes);
    SN_UNROLL for (int j = 0; j < Some; ++j) {
      direction.load(factor + (chunk * Some + j) * kLanes);
      SN_UNROLL for (int i = 0; i < Rows; ++i) total[j][i].add(direction, row[i]);
    }
  }
  if (rest) {
    Lanes<Width> row, direction;
    SN_UNROLL for (int j = 0; j < Some; ++j) {
      direction.load(factor + (chunks * Some + j) * kLanes);
      SN_UNROLL for (int i = 0; i < Rows; ++i) {
        row.load(rest + i * kLanes);
        total[j][i].add(direction, row);
      }
    }
  }
  SN_UNROLL for (int j = 0; j < Some; ++j)
    SN_UNROLL for (int i = 0; i < Rows; i += 4) fold(&total[j][i], &sums[j][i]);
}

// Calls work(count) with count, 1 to Most, as a compile-time constant.
template <int Most, typename Work>
SN_INLINE void with_constant(int64_t count, const Work& work) {
  if constexpr (Most > 1) {
    if (count < Most) return with_constant<Most - 1>(count, work);
  }
  work(std::integral_constant<int, Most>{});
}

// The start of a block of directions; blocks have about equal size.
SN_INLINE int64_t block_start(int64_t block, int64_t blocks, int64_t directions) {
  return block * directions / blocks;
}

// Interleaves the directions of each block, 16 numbers at a time, padded with zeros.
std::vector<float> in_turn(const Matrix<const float>& factor, int64_t most) {
  const int64_t chunks = (factor.columns + kLanes - 1) / kLanes;
  const int64_t blocks = (factor.rows + most - 1) / most;
  std::vector<float> turned(static_cast<size_t>(chunks * factor.rows * kLanes));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_start(block, blocks, factor.rows);
    const int64_t some = block_start(block + 1, blocks, factor.rows) - first;
    float* to = turned.data() + first * chunks * kLanes;
    for (int64_t j = 0; j < some; ++j)
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        std::copy_n(factor.at + (first + j) * factor.stride + chunk * kLanes,
                    std::min<int64_t>(kLanes, factor.columns - chunk * kLanes),
                    to + (chunk * some + j) * kLanes);
  }
  return turned;
}

template <int Width, int Rows, int Most>
SN_INLINE void times_rows_by(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                             const Matrix<float>& sums, const float* turned) {
  const int64_t chunks = matrix.columns / kLanes, over = matrix.columns % kLanes;
  const int64_t length = (chunks + (over > 0)) * kLanes;
  const int64_t blocks = (factor.rows + Most - 1) / Most;
  for (int64_t i = 0; i < matrix.rows; i += Rows) {
    const int64_t here = std::min<int64_t>(Rows, matrix.rows - i);
    const float* rows[Rows];
    float rest[Rows * kLanes] = {};
    for (int64_t at = 0; at < Rows; ++at) {  // the last row substitutes for missing ones
      rows[at] = matrix.at + (i + std::min(at, here - 1)) * matrix.stride;
      std::copy_n(rows[at] + chunks * kLanes, over, rest + at * kLanes);
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block_start(block, blocks, factor.rows);
      const int64_t some = block_start(block + 1, blocks, factor.rows) - first;
      float found[Most][Rows];
      with_constant<Most>(some, [&](auto constant) SN_INSIDE {
        rows_block<Width, Rows, constant>(rows, chunks, over ? rest : nullptr,
                                          turned + first * length, found);
      });
      for (int64_t own = 0; own < some; ++own)
        std::copy_n(found[own], here, sums.at + (first + own) * sums.stride + i);
    }
  }
}

// Multiplies some directions by Wide times 16 columns of up to kRows rows.
template <int Width, int Some, int Wide>
SN_INLINE void columns_block(const float* matrix, int64_t stride, int64_t rows,
                             const float* factor, int64_t factor_stride, float* sums,
                             int64_t sums_stride, bool fresh) {
  Lanes<Width> total[Some][Wide] = {};
  if (!fresh)
    SN_UNROLL for (int j = 0; j < Some; ++j)
      SN_UNROLL for (int w = 0; w < Wide; ++w) total[j][w].load(sums + j * sums_stride + w * kLanes);
  for (int64_t i = 0; i < rows; ++i) {
    Lanes<Width> row[Wide], direction;
    SN_UNROLL for (int w = 0; w < Wide; ++w) row[w].load(matrix + i * stride + w * kLanes);
    SN_UNROLL for (int j = 0; j < Some; ++j) {
      direction.fill(factor[j * factor_stride + i]);
      SN_UNROLL for (int w = 0; w < Wide; ++w) total[j][w].add(direction, row[w]);
    }
  }
  SN_UNROLL for (int j = 0; j < Some; ++j)
    SN_UNROLL for (int w = 0; w < Wide; ++w) total[j][w].store(sums + j * sums_stride + w * kLanes);
}

template <int Width, int Most, int Wide>
SN_INLINE void times_columns_by(const Matrix<const float>& matrix,
                                const Matrix<const float>& factor, const Matrix<float>& sums) {
  const int64_t blocks = (factor.rows + Most - 1) / Most;
  for (int64_t i = 0; i < matrix.rows; i += kRows) {
    const int64_t here = std::min(kRows, matrix.rows - i);
    for (int64_t k = 0; k < matrix.columns;) {
      const int64_t left = matrix.columns - k;
      const int64_t wide = left >= Wide * kLanes ? Wide * kLanes : std::min<int64_t>(left, kLanes);
      const float* own = matrix.at + i * matrix.stride + k;
      float* found = sums.at + k;
      int64_t stride = matrix.stride;
      float part[kRows * kLanes], some[Most * kLanes] = {};
      if (wide < kLanes) {  // copy the last few columns to a padded buffer
        std::fill_n(part, here * kLanes, 0.0f);
        for (int64_t at = 0; at < here; ++at)
          std::copy_n(own + at * stride, wide, part + at * kLanes);
        own = part;
        stride = kLanes;
      }
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block_start(block, blocks, factor.rows);
        const int64_t count = block_start(block + 1, blocks, factor.rows) - first;
        const float* with = factor.at + first * factor.stride + i;
        float* to = found + first * sums.stride;
        if (wide == Wide * kLanes) {
          with_constant<Most>(count, [&](auto constant) SN_INSIDE {
            columns_block<Width, constant, Wide>(own, stride, here, with, factor.stride, to,
                                                 sums.stride, !i);
          });
          continue;
        }
        for (int64_t j = 0; i && j < count; ++j)
          std::copy_n(to + j * sums.stride, wide, some + j * kLanes);
        with_constant<Most>(count, [&](auto constant) SN_INSIDE {
          columns_block<Width, constant, 1>(own, stride, here, with, factor.stride, some, kLanes,
                                            !i);
        });
        for (int64_t j = 0; j < count; ++j)
          std::copy_n(some + j * kLanes, wide, to + j * sums.stride);
      }
      k += wide;
    }
  }
}

// Computes four rows and Wide times 16 columns of left^T right.
template <int Width, int Wide>
SN_INLINE void outer_block(const float* left, int64_t left_stride, const float* right,
                           int64_t right_stride, int64_t directions, float* out, int64_t stride,
                           bool subtract) {
  Lanes<Width> total[4][Wide] = {};
  for (int64_t j = 0; j < directions; ++j) {
    Lanes<Width> row[Wide], factor;
    SN_UNROLL for (int w = 0; w < Wide; ++w) row[w].load(right + j * right_stride + w * kLanes);
    SN_UNROLL for (int i = 0; i < 4; ++i) {
      factor.fill(left[j * left_stride + i]);
      SN_UNROLL for (int w = 0; w < Wide; ++w) total[i][w].add(factor, row[w]);
    }
  }
  SN_UNROLL for (int i = 0; i < 4; ++i)
    SN_UNROLL for (int w = 0; w < Wide; ++w) {
      float* to = out + i * stride + w * kLanes;
      if (subtract) {
        Lanes<Width> before;
        before.load(to);
        total[i][w].subtract_from(before);
      }
      total[i][w].store(to);
    }
}

template <int Width, int Wide>
SN_INLINE void outer_by(const Matrix<const float>& left, const Matrix<const float>& right,
                        const Matrix<float>& matrix, bool subtract, const float* turned,
                        float* fours) {
  const int64_t directions = left.rows, even = matrix.columns / kLanes * kLanes;
  float part[4 * kLanes];
  for (int64_t first = 0; first < matrix.rows; first += kRows) {
    const int64_t last = std::min(first + kRows, matrix.rows);
    for (int64_t k = 0; k < matrix.columns;) {
      const int64_t rest = matrix.columns - k;
      const int64_t wide = rest >= Wide * kLanes ? Wide * kLanes : std::min<int64_t>(rest, kLanes);
      const float* with = k < even ? right.at + k : turned;
      const int64_t with_stride = k < even ? right.stride : kLanes;
      for (int64_t i = first; i < last; i += 4) {
        const float* own = left.at + i;
        int64_t own_stride = left.stride;
        const int64_t here = std::min<int64_t>(4, last - i);
        float* out = matrix.at + i * matrix.stride + k;
        if (here < 4) {
          for (int64_t j = 0; j < directions; ++j)
            std::copy_n(left.at + j * left.stride + i, here, fours + 4 * j);
          own = fours;
          own_stride = 4;
        }
        if (here == 4 && wide == Wide * kLanes) {
          outer_block<Width, Wide>(own, own_stride, with, with_stride, directions, out, matrix.stride,
                            subtract);
          continue;
        }
        for (int64_t at = 0; at < wide; at += kLanes) {
          const int64_t few = std::min<int64_t>(kLanes, wide - at);
          std::fill_n(part, 4 * kLanes, 0.0f);
          for (int64_t row = 0; subtract && row < here; ++row)
            std::copy_n(out + row * matrix.stride + at, few, part + row * kLanes);
          outer_block<Width, 1>(own, own_stride, with + at, with_stride, directions, part, kLanes,
                         subtract);
          for (int64_t row = 0; row < here; ++row)
            std::copy_n(part + row * kLanes, few, out + row * matrix.stride + at);
        }
      }
      k += wide;
    }
  }
}

// The products compiled for one instruction set.
struct Kernel {
  int64_t most;  // directions per block of `turned`
  void (*rows)(const Matrix<const float>&, const Matrix<const float>&, const Matrix<float>&,
               const float* turned);
  void (*columns)(const Matrix<const float>&, const Matrix<const float>&, const Matrix<float>&);
  void (*outer)(const Matrix<const float>&, const Matrix<const float>&, const Matrix<float>&,
                bool subtract, const float* turned, float* fours);
};

// Defines the kernel of an instruction set: the width of its registers, and the rows, directions
// and columns processed at a time, as many as these hold.
#define SN_PRODUCTS(name, target, width, rows, rows_most, columns_most, columns_wide, outer_wide) \
  template <auto product, typename... Args>                                                       \
  target void name##_in(Args... args) {                                                           \
    product(args...);                                                                             \
  }                                                                                               \
  constexpr Kernel name = {rows_most, name##_in<times_rows_by<width, rows, rows_most>>,           \
                           name##_in<times_columns_by<width, columns_most, columns_wide>>,        \
                           name##_in<outer_by<width, outer_wide>>};

SN_PRODUCTS(plain, , 4, 4, 1, 2, 1, 1)
#if defined(__x86_64__) && defined(__GNUC__)
SN_PRODUCTS(avx2, __attribute__((target("avx2"))), 8, 4, 1, 3, 2, 1)
SN_PRODUCTS(avx512, __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl"))), 16, 8, 3,
            6, 4, 4)
constexpr Kernel kKernels[] = {plain, avx2, avx512};

int supported() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 1;
  const bool all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return all ? 3 : 2;
}
#else
constexpr Kernel kKernels[] = {plain};

int supported() { return 1; }
#endif

}  // namespace

int product_kernels() { return supported(); }

void times_rows(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                const Matrix<float>& sums, int kernel) {
  const Kernel& use = kKernels[kernel];
  use.rows(matrix, factor, sums, in_turn(factor, use.most).data());
}

void times_columns(const Matrix<const float>& matrix, const Matrix<const float>& factor,
                   const Matrix<float>& sums, int kernel) {
  if (!matrix.rows)
    for (int64_t j = 0; j < sums.rows; ++j)
      std::fill_n(sums.at + j * sums.stride, sums.columns, 0.0f);
  kKernels[kernel].columns(matrix, factor, sums);
}

void outer(const Matrix<const float>& left, const Matrix<const float>& right,
           const Matrix<float>& matrix, bool subtract, int kernel) {
  // The last columns of `right`, padded, and a buffer for the last rows.
  const int64_t even = matrix.columns / kLanes * kLanes;
  std::vector<float> turned(static_cast<size_t>(right.rows * kLanes)),
      fours(static_cast<size_t>(right.rows * 4));
  for (int64_t j = 0; j < right.rows; ++j)
    std::copy_n(right.at + j * right.stride + even, matrix.columns - even,
                turned.data() + j * kLanes);
  kKernels[kernel].outer(left, right, matrix, subtract, turned.data(), fours.data());
}

SN_CLONES double remember(const float* memory, const float* gradient, float decay, float* out,
                          int64_t count) {
  double total = 0;
  for (int64_t start = 0; start < count; start += 1024) {
    const int64_t end = std::min(start + 1024, count), even = start + (end - start) / 64 * 64;
    float squares[64] = {};
    for (int64_t i = start; i < even; i += 64)
      for (int64_t lane = 0; lane < 64; ++lane) {
        const float value = memory[i + lane] * decay + gradient[i + lane];
        out[i + lane] = value;
        squares[lane] += value * value;
      }
    for (int64_t i = even; i < end; ++i) {
      const float value = memory[i] * decay + gradient[i];
      out[i] = value;
      squares[i - even] += value * value;
    }
    for (const float square : squares) total += square;
  }
  return total;
}

}  // namespace sn
