#include "record.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "pack.h"
#include "quantize.h"
#include "select.h"

namespace sn {
namespace {

// Squared norm of the block: inner bins stand for a conjugate pair.
double energy(const float* parts, float scale, const Layout& layout) {
  const int64_t last = 2 * (layout.bins() - 1);
  double total = 2 * squares(parts, scale, last + 2) - squares(parts, scale, 2);
  if (layout.block % 2 == 0) total -= squares(parts + last, scale, 2);
  return total / scale / scale;
}

// Writes the codes of the kept bins and subtracts from `parts` what they decode to.
template <typename Encode, typename Decode>
void put_values(float* parts, const uint32_t* positions, uint32_t* words, const Layout& layout,
                Encode encode, Decode decode) {
  int64_t at = 16;
  for (int64_t i = 0; i < layout.kept; ++i)
    for (int side = 0; side < 2; ++side, at += layout.code_bits) {
      float& value = parts[2 * static_cast<int64_t>(positions[i]) + side];
      const uint32_t code = encode(value);
      put(words, at, code, layout.code_bits);
      value -= decode(code);
    }
}

template <typename Decode>
bool add_values(const uint32_t* words, float* accum, const Layout& layout, float weight,
                Decode decode) {
  return each_position(words, layout.positions_at(), layout.kept, layout.bins(), layout.bitmap,
                       [&](int64_t i, int64_t position) {
                         const int64_t at = 16 + 2 * i * layout.code_bits;
                         for (int side = 0; side < 2; ++side) {
                           const uint32_t code =
                               get(words, at + side * layout.code_bits, layout.code_bits);
                           accum[2 * position + side] += decode(code) * weight;
                         }
                       });
}

}  // namespace

Tally encode_records(float* spectrum, float* memory, uint32_t* words, int64_t rows,
                     const Layout& layout, float decay, int64_t top) {
  const int64_t bins = layout.bins(), parts_count = 2 * bins;
  std::vector<int32_t> keys(bins);
  std::vector<uint32_t> positions(layout.kept);
  std::vector<uint8_t> flags;
  Tally tally;
  for (int64_t row = 0; row < rows; ++row) {
    float* parts = spectrum + row * parts_count;
    float* kept_memory = memory ? memory + row * parts_count : nullptr;
    uint32_t* out = words + row * layout.words;
    std::memset(out, 0, layout.words * 4);
    const uint32_t peak = accumulate(parts, kept_memory, decay, parts_count);
    if (peak > kMaxFinite) {  // the memory stays; every rank will see NaN
      std::memset(parts, 0, parts_count * 4);
      put(out, 0, kNonFinite, 16);
      continue;
    }
    const float scale = square_scale(peak);
    tally.energy += energy(parts, scale, layout);
    magnitude_keys(parts, scale, keys.data(), bins);
    largest(keys.data(), bins, layout.kept, flags, positions.data());
    if (layout.half) {
      const uint32_t end = HalfScale::top_for(peak);
      const HalfScale format(end);
      put(out, 0, end, 16);
      put_values(
          parts, positions.data(), out, layout, [&](float v) { return format.encode(v); },
          [&](uint32_t code) { return format.decode(code); });
    } else {
      const uint32_t end =
          top < 0 ? Window::top_for(peak, layout.mantissa) : static_cast<uint32_t>(top);
      const Window format(layout.code_bits, layout.mantissa, end);
      put(out, 0, end, 16);
      put_values(
          parts, positions.data(), out, layout,
          [&](float v) { return format.encode(v, tally.saturated); },
          [&](uint32_t code) { return format.decode(code); });
    }
    if (layout.bitmap)
      put_bitmap(out, layout.positions_at(), positions.data(), layout.kept);
    else
      put_elias_fano(out, layout.positions_at(), positions.data(), layout.kept, bins);
    tally.error += energy(parts, scale, layout);
    if (kept_memory) std::memcpy(kept_memory, parts, parts_count * 4);
  }
  return tally;
}

int64_t decode_records(const uint32_t* words, float* accum, int64_t rows, const Layout& layout,
                       float weight) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t* in = words + row * layout.words;
    float* out = accum + row * 2 * layout.bins();
    const uint32_t end = get(in, 0, 16);
    if (end == kNonFinite) {
      std::fill(out, out + 2 * layout.bins(), std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    if (end > kMaxFinite >> 16) return row;
    bool sound;
    if (layout.half) {
      const HalfScale format(end);
      sound = add_values(in, out, layout, weight, [&](uint32_t code) { return format.decode(code); });
    } else {
      const Window format(layout.code_bits, layout.mantissa, end);
      sound = add_values(in, out, layout, weight, [&](uint32_t code) { return format.decode(code); });
    }
    if (!sound) return row;
  }
  return -1;
}

}  // namespace sn
