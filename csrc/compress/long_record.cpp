#include "long_record.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "codes.h"
#include "lanes.h"
#include "pack.h"
#include "select.h"

namespace sn {
namespace {

constexpr int64_t kRun = 4096;  // keys looked at while they are in the first cache

SN_CLONES void keys_of_cells(const float* __restrict cells, float scale, int32_t* __restrict keys,
                             int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t lane = 0; lane < kSide; ++lane) {
      const float bin[2] = {cells[i * kCell + lane], cells[i * kCell + kSide + lane]};
      keys[i * kSide + lane] = complex_key(bin, scale);
    }
}

SN_CLONES int64_t count_above(const int32_t* keys, int32_t bound, int64_t count) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += keys[i] > bound;
  return found;
}

// A bit for each of 64 keys, set if it is from low to high.
inline uint64_t map_between(const int32_t* keys, int32_t low, int32_t high) {
  uint8_t flags[64];
  for (int i = 0; i < 64; ++i) flags[i] = (keys[i] >= low) & (keys[i] <= high);
  uint64_t map = 0;
  for (int i = 0; i < 64; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    map |= eight * 0x0102040810204080u >> 56 << i;  // eight bytes of 0 or 1 to eight bits
  }
  return map;
}

SN_CLONES void maps_between(const int32_t* keys, int32_t low, int32_t high, uint64_t* maps,
                            int64_t count) {
  for (int64_t i = 0; i < count; ++i) maps[i] = map_between(keys + 64 * i, low, high);
}

constexpr int32_t kLargestKey = 0x7FFFFFFF;

// What is to be kept: the keys above the threshold, and the first `ties` of those equal to it.
struct Threshold {
  int32_t key;
  int64_t ties, equal;
};

// The kept-th largest key of a plane. Of a sample, keys a little above and below it are taken; one
// pass over the plane counts those above and lists those between, among which it is unless the
// sample was bad. Then keys farther apart are taken, at last everything: sorting out half a million
// takes three times as long as their transform.
class Search {
 public:
  Search(const float* plane, int64_t cells, float scale, int64_t kept)
      : plane_(plane), cells_(cells), scale_(scale), kept_(kept), keys_(kRun), maps_(kRun / 64) {}

  Threshold find() {
    sample();
    for (const int64_t times : {1, 6}) {
      bracket(times);
      if (listed()) return found();
    }
    low_ = 0, high_ = kLargestKey;
    listed();
    return found();
  }

 private:
  Threshold found() {
    const int64_t rank = kept_ - above_ - 1;
    const auto at = between_.begin() + rank;
    std::nth_element(between_.begin(), at, between_.end(), std::greater<int32_t>());
    Threshold told{*at, 0, 0};
    int64_t more = above_;
    for (const int32_t key : between_) more += key > told.key, told.equal += key == told.key;
    told.ties = kept_ - more;
    return told;
  }

  void sample() {
    // An odd step, so that all columns are in it; at least one key in 128.
    constexpr int64_t kStep = 61;
    const int64_t count = (cells_ + kStep - 1) / kStep;
    sample_.resize(count * kSide);
    for (int64_t i = 0; i < count; ++i)
      keys_of_cells(plane_ + i * kStep * kCell, scale_, &sample_[i * kSide], 1);
  }

  void bracket(int64_t times) {
    const auto size = static_cast<int64_t>(sample_.size());
    const auto share = static_cast<double>(kept_) / static_cast<double>(cells_ * kSide);
    const double rank_in_sample = share * static_cast<double>(size);
    const auto rank = static_cast<int64_t>(rank_in_sample);
    // Four standard deviations of the rank that a key has among so many drawn at random.
    const double spread = 4 * std::sqrt(rank_in_sample * std::max(0.0, 1 - share));
    const int64_t slack = times * (16 + size / 256 + static_cast<int64_t>(spread));
    const auto key_at = [&](int64_t at) {
      std::nth_element(sample_.begin(), sample_.begin() + at, sample_.end(),
                       std::greater<int32_t>());
      return sample_[at];
    };
    high_ = rank - slack < 0 ? kLargestKey : key_at(rank - slack);
    low_ = rank + slack >= size ? 0 : key_at(rank + slack);
  }

  // Whether the key is among those listed.
  bool listed() {
    above_ = 0;
    between_.clear();
    for (int64_t cell = 0; cell < cells_; cell += kRun / kSide) {
      const int64_t cells = std::min(kRun / kSide, cells_ - cell), count = cells * kSide;
      keys_of_cells(plane_ + cell * kCell, scale_, keys_.data(), cells);
      above_ += count_above(keys_.data(), high_, count);
      std::fill(keys_.begin() + count, keys_.end(), -1);
      maps_between(keys_.data(), low_, high_, maps_.data(), kRun / 64);
      for (int64_t i = 0; i < kRun / 64; ++i)
        for (uint64_t map = maps_[i]; map; map &= map - 1)
          between_.push_back(keys_[64 * i + __builtin_ctzll(map)]);
    }
    return above_ < kept_ && kept_ <= above_ + static_cast<int64_t>(between_.size());
  }

  const float* const plane_;
  const int64_t cells_;
  const float scale_;
  const int64_t kept_;
  int32_t low_ = 0, high_ = kLargestKey;
  int64_t above_ = 0;
  std::vector<int32_t> sample_, keys_, between_;
  std::vector<uint64_t> maps_;
};

// Writes one record, a run of bins in natural order after the other.
class RunEncoder {
 public:
  // longest: bins of a run; words: zeros.
  RunEncoder(const Layout& layout, float scale, Threshold threshold, uint32_t peak, int64_t top,
             int64_t longest, uint32_t* words)
      : layout_(layout),
        scale_(scale),
        threshold_(threshold),
        words_(words),
        codes_at_(layout.head_bits()),
        uppers_at_(layout.positions_at() + layout.kept * low_bits(layout.kept, layout.bins())),
        keys_((longest + 63) / 64 * 64),
        maps_(keys_.size() / 64),
        where_(longest),
        codes_(2 * longest),
        values_(2 * longest) {
    if (layout.values == Values::half)
      words[0] = HalfScale::head_for(peak);
    else
      words[0] = top < 0 ? Window::top_for(peak, layout.mantissa) : static_cast<uint32_t>(top);
    head_ = words[0];
    places_ = Writer(words, layout.positions_at());
  }

  // Bins first.. as [count] pairs, which become what the record loses.
  void run(float* pairs, int64_t first, int64_t count) {
    std::fill(keys_.begin() + count, keys_.end(), -1);
    magnitude_keys(pairs, scale_, 2, keys_.data(), count);
    tally_.energy += energy(first, count);
    const int64_t kept = choose(count);
    put_places(first, count, kept);
    for (int64_t i = 0; i < kept; ++i) std::memcpy(&values_[2 * i], pairs + 2 * where_[i], 8);
    put_values(2 * kept);
    for (int64_t i = 0; i < kept; ++i) std::memcpy(pairs + 2 * where_[i], &values_[2 * i], 8);
    for (int64_t i = 0; i < kept; ++i) keys_[where_[i]] = complex_key(&values_[2 * i], scale_);
    // The imaginary parts of the edge bins say nothing of a real vector.
    if (first == 0) clear_edge(pairs, 0);
    if (first + count == layout_.bins()) clear_edge(pairs, count - 1);
    tally_.error += energy(first, count);
  }

  Tally finish() {
    places_.flush();
    tally_.energy = tally_.energy / scale_ / scale_;
    tally_.error = tally_.error / scale_ / scale_;
    return tally_;
  }

 private:
  // Of the run's keys; inner bins stand for a conjugate pair.
  double energy(int64_t first, int64_t count) const {
    double total = 2 * squares(keys_.data(), scale_, 2, count);
    if (first == 0) total -= squares(keys_.data(), scale_, 2, 1);
    if (first + count == layout_.bins()) total -= squares(&keys_[count - 1], scale_, 2, 1);
    return total;
  }

  void clear_edge(float* pairs, int64_t at) {
    pairs[2 * at + 1] = 0;
    keys_[at] = complex_key(pairs + 2 * at, scale_);
  }

  // Which bins of the run are kept: maps_ and where_.
  int64_t choose(int64_t count) {
    const int64_t words = (count + 63) / 64;
    maps_between(keys_.data(), threshold_.key, kLargestKey, maps_.data(), words);
    if (threshold_.ties < threshold_.equal)  // the last of those equal to the threshold go
      for (int64_t i = 0; i < words; ++i) {
        uint64_t equal = map_between(&keys_[64 * i], threshold_.key, threshold_.key);
        for (; equal && threshold_.ties; equal &= equal - 1) --threshold_.ties, --threshold_.equal;
        maps_[i] &= ~equal;
      }
    int64_t kept = 0;
    for (int64_t i = 0; i < words; ++i)
      for (uint64_t map = maps_[i]; map; map &= map - 1)
        where_[kept++] = static_cast<uint32_t>(64 * i + __builtin_ctzll(map));
    return kept;
  }

  void put_places(int64_t first, int64_t count, int64_t kept) {
    if (layout_.kept == layout_.bins()) return;
    if (layout_.bitmap) {
      for (int64_t i = 0; i < count; i += 32) {
        const auto map = static_cast<uint32_t>(maps_[i / 64] >> (i & 32));
        places_.put(map, static_cast<int>(std::min<int64_t>(32, count - i)));
      }
      return;
    }
    const int low = low_bits(layout_.kept, layout_.bins());
    for (int64_t i = 0; i < kept; ++i) {
      const auto position = static_cast<uint32_t>(first + where_[i]);
      places_.put(position & mask_of(low), low);
      set_bit(words_, uppers_at_ + (position >> low) + seen_++);
    }
  }

  void put_values(int64_t count) {
    if (layout_.values == Values::half)
      to_codes(HalfScale(head_), values_.data(), codes_.data(), count);
    else
      to_codes(Window(layout_.code_bits, layout_.mantissa, head_), values_.data(), codes_.data(),
               count, tally_.saturated);
    put_codes(words_, codes_at_, codes_.data(), count, layout_.code_bits);
    codes_at_ += count * layout_.code_bits;
  }

  const Layout layout_;
  const float scale_;
  Threshold threshold_;
  uint32_t* const words_;
  int64_t codes_at_, uppers_at_, seen_ = 0;
  uint32_t head_ = 0;
  Writer places_{nullptr, 0};
  std::vector<int32_t> keys_;
  std::vector<uint64_t> maps_;
  std::vector<uint32_t> where_, codes_;
  std::vector<float> values_;
  Tally tally_;
};

// Reads the positions of a record in order, some at a time.
class Places {
 public:
  Places(const uint32_t* words, const Layout& layout)
      : kept_(layout.kept),
        bins_(layout.bins()),
        all_(layout.kept == layout.bins()),
        low_(all_ || layout.bitmap ? 0 : low_bits(kept_, bins_)),
        length_(all_ ? 0 : layout.bitmap ? bins_ : upper_bits(kept_, bins_)),
        skips_(all_ || layout.bitmap ? 0 : 1),
        ones_(words, layout.positions_at() + kept_ * low_),
        lows_(words, layout.positions_at()) {}

  // The next ones, at most `room`; fewer or a position out of order mean that the record is
  // damaged.
  int64_t next(uint32_t* positions, int64_t room) {
    int64_t count = 0;
    for (; all_ && count < room && seen_ < kept_; ++seen_)
      positions[count++] = static_cast<uint32_t>(seen_);
    while (!all_ && count < room && fill()) {
      const int64_t one = start_ - 32 + __builtin_ctz(run_);
      run_ &= run_ - 1;
      const int64_t position = (one - skips_ * seen_) << low_ | lows_.get(low_);
      good_ &= seen_ < kept_ && position > last_ && position < bins_;
      last_ = position, ++seen_;
      if (!good_) return 0;
      positions[count++] = static_cast<uint32_t>(position);
    }
    return count;
  }

  // Whether there were as many as are kept, in order, and no more.
  bool good() { return good_ && seen_ == kept_ && (all_ || !fill()); }

 private:
  // Whether there is one more.
  bool fill() {
    while (!run_ && start_ < length_) {
      run_ = ones_.get(static_cast<int>(std::min<int64_t>(32, length_ - start_)));
      start_ += 32;
    }
    return run_ != 0;
  }

  const int64_t kept_, bins_;
  const bool all_;
  const int low_;
  const int64_t length_, skips_;
  Reader ones_, lows_;
  int64_t start_ = 0, seen_ = 0, last_ = -1;
  uint32_t run_ = 0;
  bool good_ = true;
};

void values_of(const uint32_t* words, const Layout& layout, int64_t first, int64_t count,
               float weight, uint32_t* codes, float* values) {
  const uint32_t head = words[0] & 0xFFFF;
  get_codes(words, layout.head_bits() + first * layout.code_bits, codes, count, layout.code_bits);
  if (layout.values == Values::range)
    from_codes(Window(layout.code_bits, layout.mantissa, head), codes, weight, values, count);
  else if (layout.values == Values::half)
    from_codes(HalfScale(head), codes, weight, values, count);
  else
    from_codes(Levels{{head, words[0] >> 16}}, codes, weight, values, count);
}

}  // namespace

Tally encode_long(const Split& split, const float* plane, uint32_t peak, float* memory,
                  uint32_t* words, const Layout& layout, int64_t top) {
  std::memset(words, 0, layout.words * 4);
  if (peak > kMaxFinite) {  // the memory stays; every rank will see NaN
    words[0] = kNonFinite;
    return {};
  }
  const float scale = square_scale(peak);
  const int64_t cells = split.plane() / kCell, height = split.height, edge = split.length() / 2;
  const Threshold threshold = Search(plane, cells, scale, layout.kept).find();
  RunEncoder encoder(layout, scale, threshold, peak, top, height, words);
  std::vector<float> pairs(2 * (height + 1));
  const auto run = [&](int64_t first, int64_t count) {
    encoder.run(pairs.data(), first, count);
    if (memory) std::memcpy(memory + 2 * first, pairs.data(), count * 8);
  };
  for (int64_t c = 0; c < split.width / 2; ++c) {
    gather_bins(split, plane, c, pairs.data());
    run(c * height, height);
  }
  const float* last = plane + split.spot(0, split.width / 2);
  pairs[0] = last[0], pairs[1] = last[kSide];
  run(edge, 1);
  return encoder.finish();
}

Decoded decode_long(const Split& split, const uint32_t* words, const Layout& layout, float weight,
                    float* plane) {
  const uint32_t head = words[0] & 0xFFFF, highest = kMaxFinite >> 16;
  if (head == kNonFinite) return Decoded::not_finite;
  if (head > highest || (layout.values == Values::two_bit && words[0] >> 16 > highest))
    return Decoded::damaged;
  Places places(words, layout);
  std::vector<uint32_t> positions(kRun), codes(2 * kRun);
  std::vector<float> values(2 * kRun);
  int64_t column = 0;  // of the plane, and the first bin that is in it
  int64_t start = 0;
  for (int64_t done = 0, count; (count = places.next(positions.data(), kRun)); done += count) {
    values_of(words, layout, 2 * done, 2 * count, weight, codes.data(), values.data());
    for (int64_t i = 0; i < count; ++i) {
      int64_t row = positions[i] - start;
      for (; row >= split.height; row -= split.height) start += split.height, ++column;
      const bool mirrored = row > split.last_row();
      float* at = plane + (mirrored ? split.spot(split.height - row, split.width - 1 - column)
                                    : split.spot(row, column));
      at[0] += values[2 * i];
      at[kSide] += mirrored ? -values[2 * i + 1] : values[2 * i + 1];
    }
  }
  return places.good() ? Decoded::good : Decoded::damaged;
}

}  // namespace sn
