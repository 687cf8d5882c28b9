// Tiles of a tensor whose rows are strided in memory, like those of channels in channels-last
// layout. A tile has as many rows as fill a cache line, so that no line is read or written twice,
// and stays in the L1 cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "groups.h"

namespace sn {

constexpr int64_t kTileRun = 256, kLine = 64;  // elements per row of a tile; bytes per line

struct Tile {
  alignas(kLine) uint8_t memory[kTileRun * kLine];
};

// Lines of kLine bytes, each `stride` bytes after the previous one; and as many lines needed later,
// of which one is prefetched with each of these.
template <typename Byte>
struct Lines {
  Byte* first;
  int64_t stride;
  Byte* next;
  int64_t next_stride;
};

// Elements [start, start + size) of rows [row, row + rows).
struct Block {
  int64_t row, rows, start, size;
};

// Calls work(block) for each tile of some rows; tiles that are adjacent in memory are consecutive.
template <typename Work>
void each_block(const Turn& turn, int64_t first, int64_t rows, int64_t run, int64_t group,
                int64_t width, Work work) {
  const int64_t most = kLine / width;
  for (int64_t row = first, end = 0; row < first + rows; row = end) {
    end = std::min(first + rows, (row / turn.rows + 1) * turn.rows);
    for (int64_t start = 0; start < run; start += group)
      for (int64_t at = row; at < end; at += most)
        work(Block{at, std::min(most, end - at), start, std::min(group, run - start)});
  }
}

#if defined(__SSE2__)
// Transposes 8 runs of 8 words of 16 bits, or 4 of 4 of 32 bits; strides are in bytes.
template <int64_t width>
inline void turn_square(const uint8_t* from, int64_t stride, uint8_t* to, int64_t to_stride) {
  const auto load = [&](int64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  };
  const auto store = [&](int64_t i, __m128i it) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), it);
  };
  if constexpr (width == 4) {
    const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
    const __m128i low = _mm_unpacklo_epi32(a, b), low2 = _mm_unpacklo_epi32(c, d);
    const __m128i high = _mm_unpackhi_epi32(a, b), high2 = _mm_unpackhi_epi32(c, d);
    store(0, _mm_unpacklo_epi64(low, low2));
    store(1, _mm_unpackhi_epi64(low, low2));
    store(2, _mm_unpacklo_epi64(high, high2));
    store(3, _mm_unpackhi_epi64(high, high2));
  } else {
    __m128i pairs[8], fours[8];
    for (int i = 0; i < 4; ++i) {
      const __m128i a = load(2 * i), b = load(2 * i + 1);
      pairs[i] = _mm_unpacklo_epi16(a, b);      // columns 0-3
      pairs[4 + i] = _mm_unpackhi_epi16(a, b);  // columns 4-7
    }
    for (int i = 0; i < 8; i += 2) {
      fours[i] = _mm_unpacklo_epi32(pairs[i], pairs[i + 1]);
      fours[i + 1] = _mm_unpackhi_epi32(pairs[i], pairs[i + 1]);
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j) {
        store(4 * i + 2 * j, _mm_unpacklo_epi64(fours[4 * i + j], fours[4 * i + 2 + j]));
        store(4 * i + 2 * j + 1, _mm_unpackhi_epi64(fours[4 * i + j], fours[4 * i + 2 + j]));
      }
  }
}
#endif

// Transposes `runs` runs of `length` words. The outer loop is over the side of memory (columns if
// `back`, else runs), the longer one of a tile, so that lines are completed one after another.
template <int64_t width, bool back>
inline void turn_runs(const uint8_t* from, int64_t stride, int64_t runs, int64_t length, uint8_t* to,
                      int64_t to_stride) {
  int64_t whole_runs = 0, whole_length = 0;
#if defined(__SSE2__)
  constexpr int64_t side = 16 / width;
  whole_runs = runs / side * side, whole_length = length / side * side;
  const int64_t outer = back ? whole_length : whole_runs, inner = back ? whole_runs : whole_length;
  for (int64_t i = 0; i < outer; i += side)
    for (int64_t j = 0; j < inner; j += side) {
      const int64_t run = back ? j : i, place = back ? i : j;
      turn_square<width>(from + run * stride + place * width, stride,
                         to + place * to_stride + run * width, to_stride);
    }
#endif
  for (int64_t run = 0; run < runs; ++run)
    for (int64_t place = run < whole_runs ? whole_length : 0; place < length; ++place)
      std::memcpy(to + place * to_stride + run * width, from + run * stride + place * width, width);
}

// memcpy() of few bytes, mostly the contiguous ones of norms over groups of channels.
inline void copy_few(uint8_t* to, const uint8_t* from, int64_t bytes) {
  switch (bytes) {
    case 8: std::memcpy(to, from, 8); break;
    case 16: std::memcpy(to, from, 16); break;
    case 32: std::memcpy(to, from, 32); break;
    case 64: std::memcpy(to, from, 64); break;
    default: std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

// Copies between memory and a tile: reads the tile if `back`, else writes it.
template <int64_t width, bool back, typename Byte>
inline void move_block(const Turn& turn, const Block& block, Byte* memory, Tile& tile) {
  const int64_t row = block.row / turn.rows * turn.far_row + block.row % turn.rows * turn.near_row;
  const int64_t line = kTileRun * width;
  for (int64_t t = 0, count = 0; t < block.size; t += count) {
    const int64_t at = block.start + t, place = at % turn.piece;
    count = std::min(block.size - t, turn.piece - place);
    Byte* here = memory + width * (row + at / turn.piece * turn.far + place * turn.near);
    uint8_t* column = tile.memory + width * t;
    if (turn.near_row == 1) {
      if constexpr (back)
        turn_runs<width, true>(column, line, block.rows, count, here, width * turn.near);
      else
        turn_runs<width, false>(here, width * turn.near, count, block.rows, column, line);
    } else {
      for (int64_t r = 0; r < block.rows; ++r) {
        Byte* there = here + width * r * turn.near_row;
        if constexpr (back)
          copy_few(there, column + line * r, width * count);
        else
          copy_few(column + line * r, there, width * count);
      }
    }
  }
}

// The lines of a block that is one line wide, with rows adjacent in memory; `first` is null if the
// lines do not have a constant stride. With `all`, the other blocks of its rows follow.
template <typename Byte>
inline Lines<Byte> lines_of(const Turn& turn, const Block& block, int64_t width, bool all,
                            Byte* memory) {
  const auto place_of = [&](int64_t row, int64_t start) {
    return memory + width * (row / turn.rows * turn.far_row + row % turn.rows +
                             start / turn.piece * turn.far + start % turn.piece * turn.near);
  };
  const bool across = block.start % turn.piece + block.size > turn.piece;
  if (across && turn.far != turn.piece * turn.near) return {nullptr, 0, nullptr, 0};
  Byte* first = place_of(block.row, block.start);
  const int64_t stride = width * turn.near;
  if (!all || turn.near != turn.rows) return {first, stride, first + kLine, stride};
  // What all these blocks need next is contiguous: each prefetches a part of it, as memory delivers
  // adjacent lines sooner than distant ones.
  const int64_t before = block.row % turn.rows;
  Byte* next = place_of(block.row - before, block.start + block.size);
  return {first, stride, next + width * before * block.size, kLine};
}

}  // namespace sn
