// Real FFT of one long vector, split in two dimensions so that its passes stay in the cache.
// Twin: ops/spectra/long_fourier.py, where the formulas are.
//
// The vector is a matrix of `height` rows and `width` columns. Transforms of its columns, a turn
// of each element, transforms of the rows: each of these takes sixteen side by side, which fill a
// vector register and the cache lines of a row's piece. Between the two halves, and for whoever
// reads the spectrum, lies the plane: tiles of sixteen rows of the transformed columns (of which
// height / 2 + 1 are kept: the columns are real), one cell for each of the row's elements. A cell
// is sixteen real parts, then sixteen imaginary parts. Bin k = r + height * c is in row r of the
// plane at c, or, where r > height / 2, its conjugate is in row height - r at width - 1 - c.
//
// Every result is the same whatever range of tiles a call works on.
#pragma once

#include <cstdint>

namespace sn {

constexpr int64_t kSide = 16;          // transforms side by side
constexpr int64_t kCell = 2 * kSide;   // floats of a cell; columns of a tile of columns
constexpr int64_t kFineTurns = 64;     // ops/spectra/long_fourier.py: FINE

struct Split {
  int64_t height, width;       // both at least 32, width even
  const float* height_roots;   // [roots_of(height)], ops/spectra/long_fourier.py makes them
  const float* width_roots;    // [roots_of(width)]
  const double* turns;         // [4, width], there as well

  int64_t length() const { return height * width; }
  int64_t last_row() const { return height / 2; }
  int64_t column_tiles() const { return (width + kCell - 1) / kCell; }
  int64_t row_tiles() const { return last_row() / kSide + 1; }
  int64_t plane() const { return row_tiles() * width * kCell; }  // floats
  // Where the plane has the cell of a row of tiles.
  int64_t cell(int64_t tile, int64_t at) const { return (tile * width + at) * kCell; }
  // Where the plane has row `row` at `at`: the real part; the imaginary one is kSide further.
  int64_t spot(int64_t row, int64_t at) const { return cell(row / kSide, at) + row % kSide; }
};

// Floats in the table of roots for transforms of n points; -1 if n has a factor above 5.
int64_t roots_of(int64_t n);

// Columns first..last (in tiles) of `values`, [count] float32 and zeros behind, into the plane.
// half: round the values to float16 on the way.
void columns_forward(const Split& split, const float* values, int64_t count, bool half,
                     float* plane, int64_t first, int64_t last);

// Rows first..last (in tiles), in place: the spectrum over sqrt(length), plus decay * memory,
// [bins] complex in natural order or null. Returns the bits of the largest |part|.
uint32_t rows_forward(const Split& split, float* plane, const float* memory, float decay,
                      int64_t first, int64_t last);

// What `columns_inverse` begins with, in place; of all rows, once `settle` has been called.
void rows_inverse(const Split& split, float* plane, int64_t first, int64_t last);

// Columns first..last (in tiles) of the vector that has this spectrum: [count] float32.
void columns_inverse(const Split& split, const float* plane, float* values, int64_t count,
                     int64_t first, int64_t last);

// Bins c * height .. (c + 1) * height - 1 in natural order, as pairs, c < width / 2, from the
// plane. Writes [height + 1] pairs.
void gather_bins(const Split& split, const float* plane, int64_t c, float* pairs);
// All bins in natural order, [length / 2 + 1] pairs, from the plane and into it.
void plane_to_bins(const Split& split, const float* plane, float* bins);
void bins_to_plane(const Split& split, const float* bins, float* plane);
// What the bins in the plane say of others in it: the copies in its first and last row, and that
// imaginary parts of the first and last bin count for nothing.
void settle(const Split& split, float* plane);

}  // namespace sn
