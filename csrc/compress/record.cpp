#include "record.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codes.h"
#include "pack.h"
#include "select.h"
#include "spectrum.h"

namespace sn {
namespace {

uint32_t sign_of(float value) { return to_bits(value) >> 31; }

// Encodes one block at a time to a record; the scratch is reused.
class Encoder {
 public:
  Encoder(const Layout& layout, int64_t top)
      : layout_(layout),
        top_(top),
        largest_(layout.bins(), layout.kept),
        keys_(layout.bins()),
        positions_(layout.kept),
        values_(layout.kept * layout.parts),
        codes_(values_.size()) {}

  // `out` must be zeros; the row becomes the record's error.
  void encode(float* row, uint32_t peak, uint32_t* out) {
    const int64_t bins = layout_.bins();
    const float scale = square_scale(peak);
    magnitude_keys(row, scale, layout_.parts, keys_.data(), bins);
    tally_.energy += energy(scale);
    largest_.of(keys_.data(), positions_.data());
    each_kept([&](int64_t i, int64_t at) { values_[i] = row[at]; });
    put_values(peak, out);
    if (layout_.kept < bins) {
      if (layout_.bitmap)
        put_bitmap(out, layout_.positions_at(), positions_.data(), layout_.kept);
      else
        put_elias_fano(out, layout_.positions_at(), positions_.data(), layout_.kept, bins);
    }
    each_kept([&](int64_t i, int64_t at) { row[at] = values_[i]; });
    clear_edges(row);
    new_keys(row, scale);
    tally_.error += energy(scale);
  }

  const Tally& tally() const { return tally_; }

 private:
  // Calls visit(index among the codes, index in the row).
  template <typename Visit>
  void each_kept(Visit visit) const {
    int64_t i = 0;
    for (const int64_t position : positions_)
      for (int64_t part = 0; part < layout_.parts; ++part)
        visit(i++, position * layout_.parts + part);
  }

  // Squared norm of the block: inner complex bins represent a conjugate pair.
  double energy(float scale) const {
    const int64_t bins = layout_.bins();
    double total = squares(keys_.data(), scale, layout_.parts, bins);
    if (layout_.parts == 2) {
      total = 2 * total - squares(keys_.data(), scale, 2, 1);
      if (layout_.block % 2 == 0) total -= squares(keys_.data() + bins - 1, scale, 2, 1);
    }
    return total / scale / scale;
  }

  // The imaginary parts of the edge bins are meaningless for a real vector; a coder without a zero
  // still gives them a value, which is no error and must not enter the memory.
  void clear_edges(float* row) {
    if (layout_.parts == 1) return;
    row[1] = 0;
    if (layout_.block % 2 == 0) row[layout_.floats() - 1] = 0;
  }

  // Updates the keys to the error: only the kept bins and the edges have changed.
  void new_keys(const float* row, float scale) {
    if (layout_.parts == 1) {
      for (const int64_t bin : positions_) keys_[bin] = real_key(row[bin]);
      return;
    }
    for (const int64_t bin : positions_) keys_[bin] = complex_key(row + 2 * bin, scale);
    const int64_t last = layout_.bins() - 1;
    keys_[0] = complex_key(row, scale);
    keys_[last] = complex_key(row + 2 * last, scale);
  }

  // Encodes the kept values, which become their codes' error.
  void put_values(uint32_t peak, uint32_t* words) {
    const int64_t count = static_cast<int64_t>(values_.size());
    if (layout_.values == Values::range) {
      const uint32_t head =
          top_ < 0 ? Window::top_for(peak, layout_.mantissa) : static_cast<uint32_t>(top_);
      words[0] = head;
      to_codes(Window(layout_.code_bits, layout_.mantissa, head), values_.data(), codes_.data(),
               count, tally_.saturated);
    } else if (layout_.values == Values::half) {
      words[0] = HalfScale::head_for(peak);
      to_codes(HalfScale(words[0]), values_.data(), codes_.data(), count);
    } else {
      to_levels(Fixed(peak), words);
    }
    put_codes(words, layout_.head_bits(), codes_.data(), count, layout_.code_bits);
  }

  // One level: the mean magnitude. Two: the means of those up to the overall mean, and above it.
  void to_levels(const Fixed& fixed, uint32_t* words) {
    const int64_t count = static_cast<int64_t>(values_.size());
    const bool two = layout_.values == Values::two_bit;
    int64_t total = 0;
    for (const float value : values_) total += fixed.of(value);
    const int64_t mean = total / count;
    Levels levels{{fixed.head(mean), 0}};
    if (two) {
      int64_t upper = 0, upper_total = 0;
      for (const float value : values_) {
        const int64_t size = fixed.of(value);
        if (size > mean) ++upper, upper_total += size;
      }
      const int64_t low = upper == count ? 0 : (total - upper_total) / (count - upper);
      levels = {{fixed.head(low), fixed.head(upper ? upper_total / upper : low)}};
    }
    words[0] = levels.heads[0] | levels.heads[1] << 16;
    for (int64_t i = 0; i < count; ++i) {
      codes_[i] = sign_of(values_[i]) | (two && fixed.of(values_[i]) > mean ? 2u : 0u);
      values_[i] -= levels.decode(codes_[i]);
    }
  }

  const Layout layout_;
  const int64_t top_;
  Largest largest_;
  std::vector<int32_t> keys_;
  std::vector<uint32_t> positions_;
  std::vector<float> values_;
  std::vector<uint32_t> codes_;
  Tally tally_;
};

// Decodes one record after another; the scratch is reused.
class Decoder {
 public:
  explicit Decoder(const Layout& layout)
      : layout_(layout),
        positions_(layout.kept),
        codes_(layout.kept * layout.parts),
        values_(codes_.size()) {
    if (layout.kept == layout.bins())
      for (int64_t i = 0; i < layout.kept; ++i) positions_[i] = static_cast<uint32_t>(i);
  }

  // Adds weight * the record's values to the block; false if the record is corrupt.
  bool add(const uint32_t* words, float weight, float* accum) {
    const uint32_t head = words[0] & 0xFFFF, top = kMaxFinite >> 16;
    if (head == kNonFinite) {
      std::fill(accum, accum + layout_.floats(), std::numeric_limits<float>::quiet_NaN());
      return true;
    }
    const uint32_t second = layout_.values == Values::two_bit ? words[0] >> 16 : 0;
    if (head > top || second > top) return false;
    const int64_t bins = layout_.bins();
    if (layout_.kept < bins && !get_positions(words, layout_.positions_at(), layout_.kept, bins,
                                              layout_.bitmap, positions_.data()))
      return false;
    get_values(words, head, second, weight);
    if (layout_.parts == 2)
      for (int64_t i = 0; i < layout_.kept; ++i) {
        accum[2 * static_cast<int64_t>(positions_[i])] += values_[2 * i];
        accum[2 * static_cast<int64_t>(positions_[i]) + 1] += values_[2 * i + 1];
      }
    else
      for (int64_t i = 0; i < layout_.kept; ++i) accum[positions_[i]] += values_[i];
    return true;
  }

 private:
  void get_values(const uint32_t* words, uint32_t head, uint32_t second, float weight) {
    const int64_t count = static_cast<int64_t>(codes_.size());
    get_codes(words, layout_.head_bits(), codes_.data(), count, layout_.code_bits);
    if (layout_.values == Values::range)
      from_codes(Window(layout_.code_bits, layout_.mantissa, head), codes_.data(), weight,
                 values_.data(), count);
    else if (layout_.values == Values::half)
      from_codes(HalfScale(head), codes_.data(), weight, values_.data(), count);
    else
      from_codes(Levels{{head, second}}, codes_.data(), weight, values_.data(), count);
  }

  const Layout layout_;
  std::vector<uint32_t> positions_, codes_;
  std::vector<float> values_;
};

// Whether a transform of values plus memory, or its inverse, might overflow float32.
bool is_large(const float* values, int64_t block, const float* memory, int64_t floats) {
  const uint32_t peak = std::max(peak_of(values, block), memory ? peak_of(memory, floats) : 0);
  return peak >= to_bits(kLimit);
}

// Multiplies by 2**kShift and clips to the limit; NaN stays NaN.
void enlarge(const float* values, float* out, float limit, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::ldexp(values[i], kShift);
    out[i] = value > limit ? limit : value < -limit ? -limit : value;
  }
}

// Converts a record's head to the unit of large blocks. already: whether it is a large block's
uint32_t in_large_unit(uint32_t head, bool already) {
  if (already) return head & ~kLarge;
  if (head > kMaxFinite >> 16) return head;
  return head > kShift * kOctave ? head - kShift * kOctave : 0;
}

// Encodes row_of(i), [floats], for each row, and overwrites it.
template <typename Row>
Tally encode_each(Row row_of, float* memory, uint32_t* words, int64_t rows, const Layout& layout,
                  float decay, int64_t top) {
  const int64_t floats = layout.floats();
  Encoder encoder(layout, top);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = row_of(i);
    float* kept_memory = memory ? memory + i * floats : nullptr;
    uint32_t* out = words + i * layout.words;
    std::memset(out, 0, layout.words * 4);
    const uint32_t peak = accumulate(row, kept_memory, decay, floats);
    if (peak > kMaxFinite) {  // the memory is unchanged; every rank will decode NaN
      std::memset(row, 0, floats * 4);
      out[0] = kNonFinite;
      continue;
    }
    encoder.encode(row, peak, out);
    if (kept_memory) std::memcpy(kept_memory, row, floats * 4);
  }
  return encoder.tally();
}

}  // namespace

Tally encode_records(float* coefficients, float* memory, uint32_t* words, int64_t rows,
                     const Layout& layout, float decay, int64_t top) {
  const auto row = [=](int64_t i) { return coefficients + i * layout.floats(); };
  return encode_each(row, memory, words, rows, layout, decay, top);
}

int64_t decode_records(const uint32_t* words, float* accum, int64_t rows, const Layout& layout,
                       float weight) {
  Decoder decoder(layout);
  for (int64_t i = 0; i < rows; ++i)
    if (!decoder.add(words + i * layout.words, weight, accum + i * layout.floats())) return i;
  return -1;
}

Tally encode_blocks(const float* values, float* memory, uint32_t* words, int64_t rows,
                    const Layout& layout, float decay, int64_t top, int64_t span,
                    const float* roots) {
  const int64_t floats = layout.floats(), block = layout.block;
  const int64_t ordinary = std::min<int64_t>(top, kMaxFinite >> 16);
  Fourier fourier(block, span, roots);
  std::vector<float> scratch(floats), smaller, kept;
  Tally total;
  const auto encode = [&](const float* from, float* left, int64_t at, int64_t count, int64_t end) {
    const auto row = [&](int64_t i) {
      fourier.forward(from + i * block, scratch.data());
      return scratch.data();
    };
    return encode_each(row, left, words + at * layout.words, count, layout, decay, end);
  };
  const auto add = [&](const Tally& tally, int twice) {
    total.saturated += tally.saturated;
    total.energy += std::ldexp(tally.energy, 2 * twice);
    total.error += std::ldexp(tally.error, 2 * twice);
  };
  for (int64_t at = 0; at < rows; ++at) {
    const int64_t first = at;
    const auto own = [&](int64_t i) { return memory ? memory + i * floats : nullptr; };
    while (at < rows && !is_large(values + at * block, block, own(at), floats)) ++at;
    add(encode(values + first * block, own(first), first, at - first, ordinary), 0);
    if (at == rows) break;
    smaller.assign(values + at * block, values + (at + 1) * block);
    if (memory) kept.assign(own(at), own(at + 1));
    for (float& value : smaller) value = std::ldexp(value, -kShift);
    for (float& value : kept) value = std::ldexp(value, -kShift);
    const int64_t end = top < 0 ? top : std::max<int64_t>(top - kShift * int64_t{kOctave}, 0);
    const Tally tally = encode(smaller.data(), memory ? kept.data() : nullptr, at, 1, end);
    uint32_t& head = words[at * layout.words];
    if ((head & 0xFFFF) == kNonFinite) continue;
    head |= kLarge;
    if (memory) enlarge(kept.data(), own(at), kMemory, floats);
    add(tally, kShift);
  }
  return total;
}

int64_t decode_blocks(const std::vector<const uint32_t*>& payloads, float* values, int64_t rows,
                      const Layout& layout, float weight, int64_t span, const float* roots) {
  Fourier fourier(layout.block, span, roots);
  Decoder decoder(layout);
  std::vector<float> scratch(layout.floats());
  std::vector<uint32_t> record;
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(scratch.begin(), scratch.end(), 0.0f);
    bool large = false;
    for (const uint32_t* words : payloads) large |= words[i * layout.words] & kLarge;
    for (const uint32_t* words : payloads) {
      const uint32_t* own = words + i * layout.words;
      if (large) {
        record.assign(own, own + layout.words);
        const uint32_t head = own[0] & 0xFFFF, second = own[0] >> 16;
        const bool whole = head & kLarge, two = layout.values == Values::two_bit;
        record[0] = in_large_unit(head, whole) |
                    (two ? in_large_unit(second, whole) : second) << 16;
        own = record.data();
      }
      if (!decoder.add(own, weight, scratch.data())) return i;
    }
    float* const out = values + i * layout.block;
    fourier.inverse(scratch.data(), out);
    if (large) enlarge(out, out, from_bits(kMaxFinite), layout.block);
  }
  return -1;
}

}  // namespace sn
