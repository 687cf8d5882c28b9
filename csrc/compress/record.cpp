#include "record.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "pack.h"
#include "select.h"
#include "values.h"

namespace sn {
namespace {

// Squared norm of the block: inner complex bins stand for a conjugate pair.
double energy(const float* row, float scale, const Layout& layout) {
  double total = squares(row, scale, layout.floats());
  if (layout.parts == 2) {
    total = 2 * total - squares(row, scale, 2);
    if (layout.block % 2 == 0) total -= squares(row + layout.floats() - 2, scale, 2);
  }
  return total / scale / scale;
}

// The imaginary parts of the edge bins say nothing of a real vector; a coder without a zero gives
// them a value all the same, which is no error and has no place in the memory.
void clear_edges(float* row, const Layout& layout) {
  if (layout.parts == 1) return;
  row[1] = 0;
  if (layout.block % 2 == 0) row[layout.floats() - 1] = 0;
}

// Calls visit(value) for each kept coefficient, in the order of the codes.
template <typename Visit>
void each_kept(float* row, const std::vector<uint32_t>& positions, int64_t parts, Visit visit) {
  for (const uint32_t position : positions)
    for (int64_t part = 0; part < parts; ++part) visit(row[position * parts + part]);
}

// Writes the codes and subtracts from the row what they decode to.
template <typename Encode, typename Decode>
void put_codes(float* row, const std::vector<uint32_t>& positions, uint32_t* words,
               const Layout& layout, Encode encode, Decode decode) {
  int64_t at = layout.head_bits();
  each_kept(row, positions, layout.parts, [&](float& value) {
    const uint32_t code = encode(value);
    put(words, at, code, layout.code_bits);
    at += layout.code_bits;
    value -= decode(code);
  });
}

uint32_t sign_of(float value) { return to_bits(value) >> 31; }

// One level: the mean magnitude. Two: the means of those up to the overall mean and above it.
void put_levels(float* row, const std::vector<uint32_t>& positions, uint32_t* words,
                const Layout& layout, uint32_t peak) {
  const Fixed fixed(peak);
  const int64_t count = layout.kept * layout.parts;
  int64_t total = 0;
  each_kept(row, positions, layout.parts, [&](float& v) { total += fixed.of(v); });
  const int64_t mean = total / count;
  Levels levels{{fixed.head(mean), 0}};
  if (layout.values == Values::two_bit) {
    int64_t upper = 0, upper_total = 0;
    each_kept(row, positions, layout.parts, [&](float& v) {
      const int64_t size = fixed.of(v);
      if (size > mean) ++upper, upper_total += size;
    });
    const int64_t low = upper == count ? 0 : (total - upper_total) / (count - upper);
    levels = {{fixed.head(low), fixed.head(upper ? upper_total / upper : low)}};
    put(words, 16, levels.heads[1], 16);
  }
  put(words, 0, levels.heads[0], 16);
  const bool two = layout.values == Values::two_bit;
  put_codes(
      row, positions, words, layout,
      [&](float v) { return sign_of(v) | (two && fixed.of(v) > mean ? 2u : 0u); },
      [&](uint32_t code) { return levels.decode(code); });
}

void put_values(float* row, const std::vector<uint32_t>& positions, uint32_t* words,
                const Layout& layout, uint32_t peak, int64_t top, int64_t& saturated) {
  if (layout.values == Values::range) {
    const uint32_t head =
        top < 0 ? Window::top_for(peak, layout.mantissa) : static_cast<uint32_t>(top);
    const Window window(layout.code_bits, layout.mantissa, head);
    put(words, 0, head, 16);
    put_codes(
        row, positions, words, layout, [&](float v) { return window.encode(v, saturated); },
        [&](uint32_t code) { return window.decode(code); });
  } else if (layout.values == Values::half) {
    const uint32_t head = HalfScale::head_for(peak);
    const HalfScale half(head);
    put(words, 0, head, 16);
    put_codes(
        row, positions, words, layout, [&](float v) { return half.encode(v); },
        [&](uint32_t code) { return half.decode(code); });
  } else {
    put_levels(row, positions, words, layout, peak);
  }
}

template <typename Decode>
bool add_codes(const uint32_t* words, float* accum, const Layout& layout, float weight,
               Decode decode) {
  const auto visit = [&](int64_t i, int64_t position) {
    int64_t at = layout.head_bits() + i * layout.parts * layout.code_bits;
    for (int64_t part = 0; part < layout.parts; ++part, at += layout.code_bits)
      accum[position * layout.parts + part] += decode(get(words, at, layout.code_bits)) * weight;
  };
  if (layout.kept == layout.bins()) {
    for (int64_t i = 0; i < layout.kept; ++i) visit(i, i);
    return true;
  }
  return each_position(words, layout.positions_at(), layout.kept, layout.bins(), layout.bitmap,
                       visit);
}

bool add_values(const uint32_t* words, float* accum, const Layout& layout, float weight) {
  const uint32_t head = get(words, 0, 16);
  const uint32_t second = layout.values == Values::two_bit ? get(words, 16, 16) : 0;
  if (head > kMaxFinite >> 16 || second > kMaxFinite >> 16) return false;
  if (layout.values == Values::range) {
    const Window window(layout.code_bits, layout.mantissa, head);
    return add_codes(words, accum, layout, weight,
                     [&](uint32_t code) { return window.decode(code); });
  }
  if (layout.values == Values::half) {
    const HalfScale half(head);
    return add_codes(words, accum, layout, weight, [&](uint32_t code) { return half.decode(code); });
  }
  const Levels levels{{head, second}};
  return add_codes(words, accum, layout, weight,
                   [&](uint32_t code) { return levels.decode(code); });
}

}  // namespace

Tally encode_records(float* coefficients, float* memory, uint32_t* words, int64_t rows,
                     const Layout& layout, float decay, int64_t top) {
  const int64_t bins = layout.bins(), floats = layout.floats();
  std::vector<int32_t> keys(bins);
  std::vector<uint32_t> positions(layout.kept);
  std::vector<uint8_t> flags;
  Tally tally;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = coefficients + i * floats;
    float* kept_memory = memory ? memory + i * floats : nullptr;
    uint32_t* out = words + i * layout.words;
    std::memset(out, 0, layout.words * 4);
    const uint32_t peak = accumulate(row, kept_memory, decay, floats);
    if (peak > kMaxFinite) {  // the memory stays; every rank will see NaN
      std::memset(row, 0, floats * 4);
      put(out, 0, kNonFinite, 16);
      continue;
    }
    const float scale = square_scale(peak);
    tally.energy += energy(row, scale, layout);
    magnitude_keys(row, scale, layout.parts, keys.data(), bins);
    largest(keys.data(), bins, layout.kept, flags, positions.data());
    put_values(row, positions, out, layout, peak, top, tally.saturated);
    if (layout.kept < bins) {
      if (layout.bitmap)
        put_bitmap(out, layout.positions_at(), positions.data(), layout.kept);
      else
        put_elias_fano(out, layout.positions_at(), positions.data(), layout.kept, bins);
    }
    clear_edges(row, layout);
    tally.error += energy(row, scale, layout);
    if (kept_memory) std::memcpy(kept_memory, row, floats * 4);
  }
  return tally;
}

int64_t decode_records(const uint32_t* words, float* accum, int64_t rows, const Layout& layout,
                       float weight) {
  for (int64_t i = 0; i < rows; ++i) {
    const uint32_t* in = words + i * layout.words;
    float* out = accum + i * layout.floats();
    if (get(in, 0, 16) == kNonFinite)
      std::fill(out, out + layout.floats(), std::numeric_limits<float>::quiet_NaN());
    else if (!add_values(in, out, layout, weight))
      return i;
  }
  return -1;
}

}  // namespace sn
