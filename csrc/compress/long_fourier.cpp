#include "long_fourier.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "bits.h"
#include "butterflies.h"
#include "half.h"
#include "lanes.h"

namespace sn {
namespace {

int radix_of(int64_t n) {
  for (const int radix : {8, 4, 2, 3, 5})
    if (n % radix == 0) return radix;
  return 0;
}

// `from(k)` and `to(k, z)` name the points of one butterfly.
template <int radix, typename From, typename To>
SN_INSIDE inline void butterfly(From from, To to) {
  if constexpr (radix == 2) {
    const Two z = dft(from(0), from(1));
    to(0, z.a), to(1, z.b);
  } else if constexpr (radix == 3) {
    const Three z = dft(from(0), from(1), from(2));
    to(0, z.a), to(1, z.b), to(2, z.c);
  } else if constexpr (radix == 4) {
    const Four z = dft(from(0), from(1), from(2), from(3));
    to(0, z.a), to(1, z.b), to(2, z.c), to(3, z.d);
  } else if constexpr (radix == 5) {
    const Five z = dft(from(0), from(1), from(2), from(3), from(4));
    to(0, z.a), to(1, z.b), to(2, z.c), to(3, z.d), to(4, z.e);
  } else {
    const Eight z = dft({from(0), from(1), from(2), from(3)}, {from(4), from(5), from(6), from(7)});
    to(0, z.low.a), to(1, z.low.b), to(2, z.low.c), to(3, z.low.d);
    to(4, z.high.a), to(5, z.high.b), to(6, z.high.c), to(7, z.high.d);
  }
}

// A pass that sorts on its way (Stockham): `stride` transforms of radix * m points, cell by cell,
// become radix times as many of m points.
template <int radix>
SN_INSIDE inline void pass_of(const float* __restrict x, float* __restrict y,
                              const float* __restrict roots, int64_t m, int64_t stride) {
  for (int64_t p = 0; p < m; ++p, roots += 2 * (radix - 1))
    for (int64_t q = 0; q < stride; ++q) {
      const float* from_cell = x + (p * stride + q) * kCell;
      float* to_cell = y + (p * radix * stride + q) * kCell;
SN_APART
      for (int64_t lane = 0; lane < kSide; ++lane)
        butterfly<radix>(
            [=](int64_t k) SN_INSIDE {
              const float* at = from_cell + k * m * stride * kCell + lane;
              return Complex{at[0], at[kSide]};
            },
            [=](int64_t k, Complex z) SN_INSIDE {
              float* at = to_cell + k * stride * kCell + lane;
              if (k) z = z * Complex{roots[2 * k - 2], roots[2 * k - 1]};
              at[0] = z.re, at[kSide] = z.im;
            });
    }
}

SN_CLONES void pass(const float* x, float* y, const float* roots, int radix, int64_t m,
                    int64_t stride) {
  if (radix == 8)
    pass_of<8>(x, y, roots, m, stride);
  else if (radix == 4)
    pass_of<4>(x, y, roots, m, stride);
  else if (radix == 2)
    pass_of<2>(x, y, roots, m, stride);
  else if (radix == 3)
    pass_of<3>(x, y, roots, m, stride);
  else
    pass_of<5>(x, y, roots, m, stride);
}

// The last pass has no roots and leaves each point where it was.
template <int radix>
SN_INSIDE inline void end_of(float* x, int64_t stride) {
  for (int64_t q = 0; q < stride; ++q) {
    float* cell = x + q * kCell;
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane) {
      float* at = cell + lane;
      butterfly<radix>(
          [=](int64_t k) SN_INSIDE {
            return Complex{at[k * stride * kCell], at[k * stride * kCell + kSide]};
          },
          [=](int64_t k, Complex z) SN_INSIDE {
            at[k * stride * kCell] = z.re, at[k * stride * kCell + kSide] = z.im;
          });
    }
  }
}

SN_CLONES void end(float* x, int radix, int64_t stride) {
  if (radix == 8)
    end_of<8>(x, stride);
  else if (radix == 4)
    end_of<4>(x, stride);
  else if (radix == 2)
    end_of<2>(x, stride);
  else if (radix == 3)
    end_of<3>(x, stride);
  else
    end_of<5>(x, stride);
}

// Sixteen transforms of n points, sign -1, from n cells to n cells of `one` or `other`. `from` may
// be `other`; it is then overwritten, and otherwise left as it was.
float* transform(const float* from, float* one, float* other, const float* roots, int64_t n) {
  int64_t stride = 1;
  int radix = radix_of(n);
  for (; n > radix; radix = radix_of(n)) {
    n /= radix;
    pass(from, one, roots, radix, n, stride);
    roots += 2 * (radix - 1) * n;
    stride *= radix;
    from = one;
    std::swap(one, other);
  }
  end(other, radix, stride);
  return other;
}

struct Scratch {
  explicit Scratch(int64_t cells) : floats(2 * cells * kCell + 16) {
    // Each cell a whole number of cache lines.
    const auto at = reinterpret_cast<uintptr_t>(floats.data());
    one = floats.data() + (64 - at % 64) % 64 / 4;
    other = one + cells * kCell;
  }
  std::vector<float> floats;
  float *one, *other;
};

// exp(-2 pi i r c / length) for the columns c of one tile, the even ones first, and all rows r
// the plane has: fine[r % kFineTurns] * coarse[r / kFineTurns], each [kCell] real parts, then as
// many imaginary ones. By multiplying in double, where the errors of a thousand products are far
// below what single precision sees.
class TurnTables {
 public:
  explicit TurnTables(const Split& split)
      : split_(split),
        coarse_count_(split.last_row() / kFineTurns + 1),
        fine_(2 * kCell * kFineTurns),
        coarse_(2 * kCell * coarse_count_) {}

  void of(int64_t tile) {
    fill(tile, split_.turns, fine_.data(), kFineTurns);
    fill(tile, split_.turns + 2 * split_.width, coarse_.data(), coarse_count_);
  }
  const float* fine(int64_t row) const { return &fine_[row % kFineTurns * 2 * kCell]; }
  const float* coarse(int64_t row) const { return &coarse_[row / kFineTurns * 2 * kCell]; }

 private:
  void fill(int64_t tile, const double* steps, float* table, int64_t count) const {
    double right[kCell], up[kCell];
    for (int64_t i = 0; i < kCell; ++i) {
      const int64_t column = tile * kCell + (i < kSide ? 2 * i : 2 * (i - kSide) + 1);
      const int64_t at = std::min(column, split_.width - 1);
      right[i] = steps[at], up[i] = steps[split_.width + at];
    }
    powers(right, up, table, count);
  }
  static void powers(const double* right, const double* up, float* table, int64_t count);

  const Split& split_;
  const int64_t coarse_count_;
  std::vector<float> fine_, coarse_;
};

SN_CLONES void powers_of(const double* __restrict right, const double* __restrict up,
                         float* __restrict table, int64_t count) {
  double re[kCell], im[kCell];
  for (int64_t i = 0; i < kCell; ++i) re[i] = 1, im[i] = 0;
  for (; count; --count, table += 2 * kCell)
    for (int64_t i = 0; i < kCell; ++i) {
      table[i] = static_cast<float>(re[i]), table[kCell + i] = static_cast<float>(im[i]);
      const double next = re[i] * right[i] - im[i] * up[i];
      im[i] = re[i] * up[i] + im[i] * right[i];
      re[i] = next;
    }
}

void TurnTables::powers(const double* right, const double* up, float* table, int64_t count) {
  powers_of(right, up, table, count);
}

using Quad = float __attribute__((vector_size(16)));

// On every instruction set there is one of these for vectors of four floats.
#if defined(__clang__) || __GNUC__ >= 12
#define SN_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
using QuadMask = int __attribute__((vector_size(16)));
#define SN_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, QuadMask{i, j, k, l})
#endif

SN_INSIDE inline Quad quad(const float* from) {
  Quad four;
  std::memcpy(&four, from, 16);
  return four;
}

// 16 x 16 floats, rows `from_step` and `to_step` apart. Four at a time: the compiler makes one
// move a float of the plain loop.
SN_INSIDE inline void transpose(const float* __restrict from, int64_t from_step,
                                float* __restrict to, int64_t to_step) {
  for (int64_t i = 0; i < kSide; i += 4)
    for (int64_t j = 0; j < kSide; j += 4) {
      const float* at = from + i * from_step + j;
      const Quad a = quad(at), b = quad(at + from_step);
      const Quad c = quad(at + 2 * from_step), d = quad(at + 3 * from_step);
      const Quad ab = SN_SHUFFLE(a, b, 0, 4, 1, 5), cd = SN_SHUFFLE(c, d, 0, 4, 1, 5);
      const Quad ab2 = SN_SHUFFLE(a, b, 2, 6, 3, 7), cd2 = SN_SHUFFLE(c, d, 2, 6, 3, 7);
      const Quad rows[4] = {SN_SHUFFLE(ab, cd, 0, 1, 4, 5), SN_SHUFFLE(ab, cd, 2, 3, 6, 7),
                            SN_SHUFFLE(ab2, cd2, 0, 1, 4, 5), SN_SHUFFLE(ab2, cd2, 2, 3, 6, 7)};
      for (int64_t k = 0; k < 4; ++k) std::memcpy(to + (j + k) * to_step + i, &rows[k], 16);
    }
}

constexpr int64_t kAhead = 16;  // rows fetched before they are needed: each is in another page

// Thirty-two columns as sixteen of pairs.
SN_CLONES void load_cell(const float* __restrict values, float* __restrict cell, bool half) {
  if (half) {
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane)
      cell[lane] = through_half(values[2 * lane]),
      cell[kSide + lane] = through_half(values[2 * lane + 1]);
  } else {
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane)
      cell[lane] = values[2 * lane], cell[kSide + lane] = values[2 * lane + 1];
  }
}

void load_columns(const Split& split, const float* values, int64_t count, bool half, int64_t tile,
                  float* cells) {
  const int64_t across = std::min(kCell, split.width - tile * kCell);
  for (int64_t row = 0; row < split.height; ++row, cells += kCell) {
    const int64_t at = row * split.width + tile * kCell;
    const int64_t have = std::min(across, count - at);
    if (have == kCell) {
      if (at + kAhead * split.width + kCell <= count) {
        __builtin_prefetch(values + at + kAhead * split.width);
        __builtin_prefetch(values + at + kAhead * split.width + kSide);
      }
      load_cell(values + at, cells, half);
    } else {
      float padded[kCell] = {};
      if (have > 0) std::memcpy(padded, values + at, have * 4);
      load_cell(padded, cells, half);
    }
  }
}

// A transform of pairs holds those of the even and of the odd columns, one plus i times the other.
// Twice those, turned, into the plane: sixteen rows from `row` on.
SN_CLONES void part_rows(const Split& split, const float* __restrict cells,
                         const TurnTables& tables, int64_t tile, int64_t row,
                         float* __restrict plane) {
  alignas(64) float even_re[kSide * kSide], even_im[kSide * kSide];
  alignas(64) float odd_re[kSide * kSide], odd_im[kSide * kSide];
  for (int64_t i = 0; i < kSide; ++i) {
    const int64_t here = std::min(row + i, split.last_row());  // the rows behind stay unused
    const float* x = cells + here * kCell;
    const float* y = cells + (here ? split.height - here : 0) * kCell;
    const float* fine = tables.fine(here);
    const float* coarse = tables.coarse(here);
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane) {
      const Complex z = {x[lane], x[kSide + lane]}, w = {y[lane], y[kSide + lane]};
      const auto turn = [=](int64_t at) SN_INSIDE {
        return Complex{fine[at], fine[kCell + at]} * Complex{coarse[at], coarse[kCell + at]};
      };
      const Complex even = Complex{z.re + w.re, z.im - w.im} * turn(lane);
      const Complex odd = Complex{z.im + w.im, w.re - z.re} * turn(kSide + lane);
      const int64_t at = i * kSide + lane;
      even_re[at] = even.re, even_im[at] = even.im;
      odd_re[at] = odd.re, odd_im[at] = odd.im;
    }
    if (row + i > here)
      for (float* part : {even_re, even_im, odd_re, odd_im})
        std::fill_n(part + i * kSide, kSide, 0.0f);
  }
  float* to = plane + split.cell(row / kSide, tile * kCell);
  const auto put = [&](float* at) SN_INSIDE {
    transpose(even_re, kSide, at, 2 * kCell);
    transpose(even_im, kSide, at + kSide, 2 * kCell);
    transpose(odd_re, kSide, at + kCell, 2 * kCell);
    transpose(odd_im, kSide, at + kCell + kSide, 2 * kCell);
  };
  const int64_t across = std::min(kCell, split.width - tile * kCell);
  if (across == kCell) {
    put(to);
  } else {
    float wide[kCell * kCell];
    put(wide);
    std::memcpy(to, wide, across * kCell * 4);
  }
}

// Back: the transforms of pairs at rows row.. of the plane and at their mirrors.
SN_CLONES void join_rows(const Split& split, const float* __restrict plane,
                         const TurnTables& tables, int64_t tile, int64_t row,
                         float* __restrict cells) {
  alignas(64) float even_re[kSide * kSide], even_im[kSide * kSide];
  alignas(64) float odd_re[kSide * kSide], odd_im[kSide * kSide];
  const float* from = plane + split.cell(row / kSide, tile * kCell);
  const int64_t across = std::min(kCell, split.width - tile * kCell);
  float wide[kCell * kCell];
  if (across < kCell) {
    std::fill(std::begin(wide), std::end(wide), 0.0f);
    std::memcpy(wide, from, across * kCell * 4);
    from = wide;
  }
  transpose(from, 2 * kCell, even_re, kSide);
  transpose(from + kSide, 2 * kCell, even_im, kSide);
  transpose(from + kCell, 2 * kCell, odd_re, kSide);
  transpose(from + kCell + kSide, 2 * kCell, odd_im, kSide);
  const int64_t rows = std::min(kSide, split.last_row() + 1 - row);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t here = row + i, there = here ? split.height - here : 0;
    float* x = cells + here * kCell;
    float* y = cells + there * kCell;
    const float* fine = tables.fine(here);
    const float* coarse = tables.coarse(here);
    const bool alone = here == there;
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane) {
      const auto turn = [=](int64_t at) SN_INSIDE {
        const Complex w =
            Complex{fine[at], fine[kCell + at]} * Complex{coarse[at], coarse[kCell + at]};
        return Complex{w.re, -w.im};
      };
      const int64_t at = i * kSide + lane;
      const Complex even = Complex{even_re[at], even_im[at]} * turn(lane);
      const Complex odd = Complex{odd_re[at], odd_im[at]} * turn(kSide + lane);
      if (!alone) y[lane] = even.re + odd.im, y[kSide + lane] = odd.re - even.im;
      x[lane] = even.re - odd.im, x[kSide + lane] = even.im + odd.re;
    }
  }
}

SN_CLONES void scale_cells(const float* __restrict from, float scale, float* __restrict to,
                           int64_t cells) {
  for (int64_t i = 0; i < cells * kCell; ++i) to[i] = from[i] * scale;
}

// Adds decay * memory to a tile of rows. Also to what has no bin of its own; see `clear_copies`.
SN_CLONES void add_memory(const Split& split, const float* __restrict memory, float decay,
                          int64_t tile, float* __restrict cells) {
  const int64_t row = tile * kSide, middle = split.width / 2;
  for (int64_t c = 0; c < middle; ++c) {
    const float* kept = memory + 2 * (c * split.height + row);
    float* cell = cells + c * kCell;
    __builtin_prefetch(kept + 2 * kAhead * split.height);
    __builtin_prefetch(kept + 2 * kAhead * split.height + kSide);
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane)
      cell[lane] += kept[2 * lane] * decay, cell[kSide + lane] += kept[2 * lane + 1] * decay;
  }
  for (int64_t c = middle; c < split.width; ++c) {
    const float* kept = memory + 2 * ((split.width - c) * split.height - row - (kSide - 1));
    float* cell = cells + c * kCell;
SN_APART
    for (int64_t lane = 0; lane < kSide; ++lane) {
      const int64_t at = 2 * (kSide - 1 - lane);
      cell[lane] += kept[at] * decay;
      cell[kSide + lane] = -(-cell[kSide + lane] + kept[at + 1] * decay);  // zeros keep their sign
    }
  }
}

// Zeros what has no bin of its own: the rows behind the last, and of the first and the last row,
// which are their own mirrors, the half that says what the other half says.
void clear_copies(const Split& split, int64_t tile, float* cells) {
  const int64_t row = tile * kSide;
  const auto clear = [&](int64_t lane, int64_t from) {
    for (int64_t c = from; c < split.width; ++c)
      cells[c * kCell + lane] = cells[c * kCell + kSide + lane] = 0;
  };
  if (row == 0) clear(0, split.width / 2 + 1);
  for (int64_t lane = 0; lane < kSide; ++lane) {
    if (row + lane > split.last_row()) clear(lane, 0);
    if (2 * (row + lane) == split.height) clear(lane, split.width / 2);
  }
}

SN_CLONES uint32_t peak_of_cells(const float* cells, int64_t count) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < count * kCell; ++i)
    peak = std::max(peak, to_bits(cells[i]) & 0x7FFFFFFFu);
  return peak;
}

float scale_of(const Split& split) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(split.length())));
}

SN_CLONES void store_cell(const float* __restrict cell, float scale, float* __restrict values) {
SN_APART
  for (int64_t lane = 0; lane < kSide; ++lane)
    values[2 * lane] = cell[lane] * scale, values[2 * lane + 1] = cell[kSide + lane] * scale;
}

}  // namespace

int64_t roots_of(int64_t n) {
  int64_t count = 0;
  int radix = radix_of(n);
  for (; radix && n > radix; radix = radix_of(n)) {
    n /= radix;
    count += 2 * (radix - 1) * n;
  }
  return radix == n ? count : -1;
}

void columns_forward(const Split& split, const float* values, int64_t count, bool half,
                     float* plane, int64_t first, int64_t last) {
  Scratch scratch(split.height);
  TurnTables tables(split);
  for (int64_t tile = first; tile < last; ++tile) {
    load_columns(split, values, count, half, tile, scratch.other);
    const float* cells = transform(scratch.other, scratch.one, scratch.other, split.height_roots,
                                   split.height);
    tables.of(tile);
    for (int64_t row = 0; row <= split.last_row(); row += kSide)
      part_rows(split, cells, tables, tile, row, plane);
  }
}

uint32_t rows_forward(const Split& split, float* plane, const float* memory, float decay,
                      int64_t first, int64_t last) {
  Scratch scratch(split.width);
  const float half = 0.5f * scale_of(split);
  const int64_t middle = split.width / 2;
  uint32_t peak = 0;
  for (int64_t tile = first; tile < last; ++tile) {
    float* cells = plane + split.cell(tile, 0);
    const float* bins =
        transform(cells, scratch.one, scratch.other, split.width_roots, split.width);
    scale_cells(bins, half, cells, split.width);
    if (memory) {
      add_memory(split, memory, decay, tile, cells);
      if (tile == 0)  // the last bin is no mirror
        cells[middle * kCell] =
            bins[middle * kCell] * half + memory[split.length()] * decay;
    }
    if (tile == 0) {
      cells[kSide] = memory ? memory[1] * decay : 0;
      cells[middle * kCell + kSide] = memory ? memory[split.length() + 1] * decay : 0;
    }
    clear_copies(split, tile, cells);
    peak = std::max(peak, peak_of_cells(cells, split.width));
  }
  return peak;
}

void rows_inverse(const Split& split, float* plane, int64_t first, int64_t last) {
  Scratch scratch(split.width);
  for (int64_t tile = first; tile < last; ++tile) {
    float* cells = plane + split.cell(tile, 0);
    const float* found =
        transform(cells, scratch.one, scratch.other, split.width_roots, split.width);
    // Read backwards, the transform with sign -1 is that with sign +1.
    std::memcpy(cells, found, kCell * 4);
    for (int64_t c = 1; c < split.width; ++c)
      std::memcpy(cells + c * kCell, found + (split.width - c) * kCell, kCell * 4);
  }
}

void columns_inverse(const Split& split, const float* plane, float* values, int64_t count,
                     int64_t first, int64_t last) {
  Scratch scratch(split.height);
  TurnTables tables(split);
  const float scale = scale_of(split);
  for (int64_t tile = first; tile < last; ++tile) {
    tables.of(tile);
    for (int64_t row = 0; row <= split.last_row(); row += kSide)
      join_rows(split, plane, tables, tile, row, scratch.other);
    const float* found = transform(scratch.other, scratch.one, scratch.other, split.height_roots,
                                   split.height);
    const int64_t across = std::min(kCell, split.width - tile * kCell);
    for (int64_t row = 0; row < split.height; ++row) {
      const float* cell = found + (row ? split.height - row : 0) * kCell;
      const int64_t at = row * split.width + tile * kCell;
      const int64_t room = std::min(across, count - at);
      if (room == kCell) {
        store_cell(cell, scale, values + at);
      } else if (room > 0) {
        float padded[kCell];
        store_cell(cell, scale, padded);
        std::memcpy(values + at, padded, room * 4);
      }
    }
  }
}

namespace {

SN_CLONES void gather_mirrors(const Split& split, const float* __restrict plane, int64_t c,
                              float* __restrict pairs) {
  for (int64_t tile = 0; tile < split.row_tiles(); ++tile) {
    const float* cell = plane + split.cell(tile, split.width - 1 - c);
    float* to = pairs + 2 * (split.height - tile * kSide - (kSide - 1));
SN_APART
    for (int64_t i = 0; i < kSide; ++i) {
      const int64_t lane = kSide - 1 - i;
      to[2 * i] = cell[lane], to[2 * i + 1] = -cell[kSide + lane];
    }
  }
}

SN_CLONES void gather_direct(const Split& split, const float* __restrict plane, int64_t c,
                             float* __restrict pairs) {
  for (int64_t row = 0; row <= split.last_row(); row += kSide) {
    const float* cell = plane + split.cell(row / kSide, c);
    float* to = pairs + 2 * row;
    if (row + kSide <= split.last_row() + 1) {
SN_APART
      for (int64_t lane = 0; lane < kSide; ++lane)
        to[2 * lane] = cell[lane], to[2 * lane + 1] = cell[kSide + lane];
    } else {
      for (int64_t lane = 0; row + lane <= split.last_row(); ++lane)
        to[2 * lane] = cell[lane], to[2 * lane + 1] = cell[kSide + lane];
    }
  }
}

}  // namespace

void gather_bins(const Split& split, const float* plane, int64_t c, float* pairs) {
  gather_mirrors(split, plane, c, pairs);  // what is too much at their end, the others overwrite
  gather_direct(split, plane, c, pairs);
}

void plane_to_bins(const Split& split, const float* plane, float* bins) {
  std::vector<float> pairs(2 * (split.height + 1));
  for (int64_t c = 0; c < split.width / 2; ++c) {
    gather_bins(split, plane, c, pairs.data());
    std::memcpy(bins + 2 * c * split.height, pairs.data(), split.height * 8);
  }
  const float* last = plane + split.spot(0, split.width / 2);
  bins[split.length()] = last[0], bins[split.length() + 1] = last[kSide];
}

void bins_to_plane(const Split& split, const float* bins, float* plane) {
  std::memset(plane, 0, split.plane() * 4);
  for (int64_t c = 0; c < split.width / 2; ++c) {
    const float* pairs = bins + 2 * c * split.height;
    for (int64_t row = 0; row <= split.last_row(); ++row) {
      float* at = plane + split.spot(row, c);
      at[0] = pairs[2 * row], at[kSide] = pairs[2 * row + 1];
    }
    for (int64_t row = 1; row < split.height - split.last_row(); ++row) {
      float* at = plane + split.spot(row, split.width - 1 - c);
      const float* mirror = pairs + 2 * (split.height - row);
      at[0] = mirror[0], at[kSide] = -mirror[1];
    }
  }
  plane[split.spot(0, split.width / 2)] = bins[split.length()];
  settle(split, plane);
}

void settle(const Split& split, float* plane) {
  const int64_t width = split.width, last = split.last_row();
  const auto copy = [&](int64_t row, int64_t from, int64_t to) {
    const float* x = plane + split.spot(row, from);
    float* y = plane + split.spot(row, to);
    y[0] = x[0], y[kSide] = -x[kSide];
  };
  plane[kSide] = plane[split.spot(0, width / 2) + kSide] = 0;
  for (int64_t c = 1; c < width / 2; ++c) copy(0, c, width - c);
  if (2 * last == split.height)
    for (int64_t c = 0; c < width / 2; ++c) copy(last, c, width - 1 - c);
}

}  // namespace sn
