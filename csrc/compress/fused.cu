// The block codec in one pass over device memory: one thread block encodes or decodes one block of
// the vector. Record format and reference: ops/record.py. Cost and occupancy: docs/cuda.md.
#include "fused.cuh"

namespace sn {

using Keys = PerThread<u32, kSlots, kThreads>;

constexpr int kHalves = (kFloats / 2 + kThreads - 1) / kThreads;  // pairs of parts per thread

// Orders like the magnitude of bin t + i * kThreads: |scale * c|**2 for two parts, |c| for one.
SN_DEVICE u32 key_of(Shared& shared, int t, int i, float scale) {
  if (kParts == 1) return magnitude(own(shared, t, i, 0));
  const float re = own(shared, t, i, 0) * scale, im = own(shared, t, i, 1) * scale;
  return bits_of(re * re + im * im);
}

SN_DEVICE bool is_bin(int t, int i) { return inside<kBins, kThreads>(t, i); }

SN_DEVICE void raise(u32& largest, u32 value) {
  if (largest < value) largest = value;
}

// coefficients += decay * memory; returns the bits of the largest part.
template <typename Read>
SN_DEVICE u32 accumulate(Shared& shared, float decay, int t, Read read) {
  Complex held[kHalves];  // all loads first: stores to shared memory would delay them
  SN_UNROLL
  for (int i = 0; i < kHalves; ++i)
    if (inside<kFloats / 2, kThreads>(t, i)) held[i] = read(t + i * kThreads);
  u32 peak = 0;
  SN_UNROLL
  for (int i = 0; i < kHalves; ++i)
    if (inside<kFloats / 2, kThreads>(t, i)) {
      Complex& value = point<kThreads>(shared.data, t, i);
      value = value + scaled(held[i], decay);
      raise(peak, magnitude(value.re));
      raise(peak, magnitude(value.im));
    }
  return peak;
}

SN_DEVICE u32 add_memory(const Threads& block, Shared& shared, const Section& section, i64 row,
                         float decay) {
  u32* peak = shared.cells + kPeak;
  const i64 first = row * (kFloats / 2);
  if (section.memory) {
    block.max(peak, [&](int t) {
      return accumulate(shared, decay, t, [&](int m) {
        return element_pair<kFloat32>(section.memory, first + m);
      });
    });
  } else {
    block.max(peak, [&](int t) {
      u32 largest = 0;
      SN_UNROLL
      for (int i = 0; i < kHalves; ++i)
        if (inside<kFloats / 2, kThreads>(t, i)) {
          const Complex value = point<kThreads>(shared.data, t, i);
          raise(largest, magnitude(value.re));
          raise(largest, magnitude(value.im));
        }
      return largest;
    });
  }
  return *peak;
}

// Marks the `kept` largest keys in shared.map, ties to the lower position, with counts in
// shared.before. Radix select by eight-bit digits from the top: most blocks are done after two or
// three of four, when all keys in the digit's bucket are kept.
SN_DEVICE void select(const Threads& block, Shared& shared, u32 kept, Keys& keys) {
  u32 threshold = 0, need = kept, equal = kBins;
  if (kept < kBins) {
    for (int pass = 0; pass < 4; ++pass) {
      const int shift = pass < 3 ? 23 - 8 * pass : 0, digits = pass < 3 ? 256 : 128;
      const int done = pass < 3 ? shift + 8 : 7;
      u32 *histogram = shared.histogram[pass & 1], *next = shared.histogram[~pass & 1];
      block.each([&](int t) {
        for (int d = t; d < 256; d += kThreads) next[d] = 0;
        SN_UNROLL
        for (int i = 0; i < kSlots; ++i) {
          const u32 key = keys(t, i);
          if (is_bin(t, i) && (key ^ threshold) >> done == 0)
            atomic_add(histogram + (key >> shift & (digits - 1)), 1u);
        }
      });
      block.find_digit(histogram, digits, need, shared.cells + kDigit);
      threshold |= shared.cells[kDigit] << shift;
      need -= shared.cells[kDigit + 1];
      equal = shared.cells[kDigit + 2];
      if (equal == need) break;
    }
  }
  const bool ties = equal > need && kept < kBins;
  constexpr int kWords = kSlots * kThreads / 32;
  if (ties) {
    block.ballots<kSlots>(shared.map, [&](int t, int i) {
      return is_bin(t, i) && keys(t, i) == threshold;
    });
    block.count_before(shared.map, shared.before, kWords);
    // The first `need` of the equal keys become larger than any other, the rest smaller.
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i) {
        const int bin = t + i * kThreads;
        if (!is_bin(t, i) || keys(t, i) != threshold) continue;
        const u32 below = shared.map[bin >> 5] & ((1u << (bin & 31)) - 1);
        const bool stays = shared.before[bin >> 5] + count_ones(below) < need;
        keys(t, i) = stays ? 0x80000000u : 0;
      }
    });
    threshold += 1;
  }
  block.ballots<kSlots>(shared.map, [&](int t, int i) {
    return is_bin(t, i) && keys(t, i) >= threshold;
  });
  block.count_before(shared.map, shared.before, kWords);
}

// The heads of a block for coders that send mean magnitudes; see ops/quantize.py.
SN_DEVICE u32 mean_heads(const Threads& block, Shared& shared, const u16* positions,
                         const Settings& s, u32 peak, u32& mean) {
  const float scale = unit_scale(peak);
  const int parts = static_cast<int>(s.kept) * kParts;
  const auto fixed = [&](int j) {
    return to_fixed(coefficient(shared, positions[j / kParts], j % kParts), scale);
  };
  block.each([&](int t) {
    u64 own = 0;
    for (int j = t; j < parts; j += kThreads) own += fixed(j);
    atomic_add(&shared.sums[0], own);
  });
  const u64 total = shared.sums[0];
  mean = static_cast<u32>(total / parts);
  if (s.values == kSign) return from_fixed(mean, peak);
  block.each([&](int t) {
    u64 own = 0;
    u32 count = 0;
    for (int j = t; j < parts; j += kThreads)
      if (const u32 size = fixed(j); size > mean) own += size, ++count;
    atomic_add(&shared.sums[1], own);
    atomic_add(shared.cells + kUpper, count);
  });
  const u64 upper = shared.sums[1];
  const int count = static_cast<int>(shared.cells[kUpper]);
  const u32 low = static_cast<u32>((total - upper) / (parts - count));  // one is at most the mean
  const u32 high = count ? static_cast<u32>(upper / count) : low;
  return from_fixed(low, peak) | from_fixed(high, peak) << 16;
}

// Writes the codes and positions of the kept bins to the record; the codes' errors remain in the
// coefficients.
SN_DEVICE void write_record(const Threads& block, Shared& shared, u32* record, const u16* positions,
                            const Settings& s, u32 peak) {
  const bool means = s.values == kSign || s.values == kTwoBit;
  u32 mean = 0;
  const u32 heads = means ? mean_heads(block, shared, positions, s, peak, mean)
                          : Coder::head_for(peak, s);
  const Coder coder(heads, s);
  const float scale = unit_scale(peak);
  const int kept = static_cast<int>(s.kept), parts = kept * kParts;
  const int places = s.head_bits() + parts * s.code_bits, upper = places + kept * s.low;
  block.each([&](int t) {
    if (t == 0) atomic_or(record, heads);
    for (int j = t; j < parts; j += kThreads) {
      float& value = coefficient(shared, positions[j / kParts], j % kParts);
      u32 saturated = 0, code;
      if (means) {
        code = bits_of(value) >> 31;
        if (s.values == kTwoBit) code |= static_cast<u32>(to_fixed(value, scale) > mean) << 1;
      } else {
        code = coder.encode(value, saturated);
      }
      if (saturated) atomic_add(shared.cells + kSaturated, 1u);
      put(record, s.head_bits() + j * s.code_bits, code, s.code_bits);
      value -= coder.decode(code);
    }
    if (s.positions == kEliasFano) {
      for (int i = t; i < kept; i += kThreads) {
        const u32 position = positions[i];
        put(record, places + i * s.low, position & ((1u << s.low) - 1), s.low);
        put(record, upper + static_cast<int>(position >> s.low) + i, 1u, 1);
      }
    } else if (s.positions == kBitmap) {
      for (int w = t; w < (kBins + 31) / 32; w += kThreads)
        put(record, places + 32 * w, shared.map[w], kBins - 32 * w < 32 ? kBins - 32 * w : 32);
    }
  });
}

SN_DEVICE void encode_block(const Threads& block, Shared& shared, u32* record,
                            const Sections& table, const Settings& s, const Complex* twiddles) {
  const Section& section = section_of(table, block.index());
  const i64 row = block.index() - section.first_block;
  const int words = static_cast<int>(s.words);
  u16* positions = reinterpret_cast<u16*>(record + words);
  block.each([&](int t) {
    for (int w = t; w < words; w += kThreads) record[w] = 0;
    for (int d = t; d < 256; d += kThreads) shared.histogram[0][d] = 0;
    if (t < kCells) shared.cells[t] = 0;
    if (t < 2) shared.sums[t] = 0;
  });
  forward(block, shared, Values(section, row), twiddles);
  const u32 peak = add_memory(block, shared, section, row, s.factor);
  const bool finite = peak <= kMaxFinite;
  if (finite) {
    Keys keys;
    const float scale = unit_scale(peak);
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i)
        keys(t, i) = is_bin(t, i) ? key_of(shared, t, i, scale) : 0;
    });
    select(block, shared, static_cast<u32>(s.kept), keys);
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i) {
        const int bin = t + i * kThreads;
        const u32 marks = shared.map[bin >> 5], here = 1u << (bin & 31);
        if (marks & here)
          positions[shared.before[bin >> 5] + count_ones(marks & (here - 1))] =
              static_cast<u16>(bin);
      }
    });
    write_record(block, shared, record, positions, s, peak);
  } else {  // every rank will decode NaN, and the memory stays unchanged
    block.each([&](int t) {
      if (t == 0) record[0] = kNonFinite;
    });
  }
  u32* out = pointer<u32>(section.words) + row * words;
  const i64 first = section.first_word + row * words;
  block.parity(shared.cells + kChecksum, [&](int t) {
    return share(pointer<const u32>(s.powers), first, t, words, kThreads,
                 [&](int w) { return out[w] = record[w]; });
  });
  block.each([&](int t) {
    if (t == 0) {
      u64* totals = pointer<u64>(section.totals);
      if (shared.cells[kSaturated]) atomic_add(totals, u64{shared.cells[kSaturated]});
      atomic_xor(totals + 1, u64{shared.cells[kChecksum]});
    }
    if (!finite || !section.memory) return;
    const i64 pair = row * (kFloats / 2);
    SN_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      if (!inside<kFloats / 2, kThreads>(t, i)) continue;
      Complex left = point<kThreads>(shared.data, t, i);
      // The inverse ignores the imaginary parts of the edge bins, so they are no error.
      const int m = t + i * kThreads;
      if (kParts == 2 && (m == 0 || m == kBins - 1)) left.im = 0.0f;
      pointer<Complex>(section.memory)[pair + t + i * kThreads] = left;
    }
  });
}

// positions := those of the record; sets kDamaged unless there are `kept` below kBins,
// kDisorder unless they ascend.
// Whatever the record contains, nothing outside the arrays is accessed.
SN_DEVICE void read_positions(const Threads& block, Shared& shared, const u32* record,
                              u16* positions, const Settings& s) {
  const int kept = static_cast<int>(s.kept);
  const int places = s.head_bits() + kept * kParts * s.code_bits;
  const bool bitmap = s.positions == kBitmap;
  const int at = bitmap ? places : places + kept * s.low;
  const int bits = bitmap ? kBins : static_cast<int>(upper_bits(kept, kBins, s.low));
  const int words = (bits + 31) / 32;
  block.each([&](int t) {
    for (int w = t; w < words; w += kThreads)
      shared.map[w] = get(record, at + 32 * w, bits - 32 * w < 32 ? bits - 32 * w : 32);
  });
  block.count_before(shared.map, shared.before, words);
  block.each([&](int t) {
    if (t == 0 && shared.before[words] != s.kept) shared.cells[kDamaged] = 1;
    for (int w = t; w < words; w += kThreads) {
      int i = static_cast<int>(shared.before[w]);
      for (u32 run = shared.map[w]; run && i < kept; run &= run - 1, ++i) {
        const int one = 32 * w + lowest_one(run);
        const int position =
            bitmap ? one : (one - i) << s.low | static_cast<int>(get(record, places + i * s.low, s.low));
        if (position >= kBins) shared.cells[kDamaged] = 1;
        positions[i] = static_cast<u16>(position < kBins ? position : 0);
      }
    }
  });
  if (shared.cells[kDamaged]) return;
  block.each([&](int t) {
    for (int i = t + 1; i < kept; i += kThreads)
      if (positions[i] <= positions[i - 1]) shared.cells[kDisorder] = 1;
  });
}

SN_DEVICE void decode_block(const Threads& block, Shared& shared, u32* record,
                            const Sections& table, const Settings& s, const Complex* twiddles) {
  const Section& section = section_of(table, block.index());
  const i64 row = block.index() - section.first_block;
  const int words = static_cast<int>(s.words), parts = static_cast<int>(s.kept) * kParts;
  u16* positions = reinterpret_cast<u16*>(record + words);
  const u32* in = pointer<const u32>(section.words) + row * words;
  const i64 first = section.first_word + row * words;
  bool sound = true, finite = true;
  block.each([&](int t) {
    for (int i = t; i < kFloats; i += kThreads) shared.data[slot(i)] = 0.0f;
    if (t < kCells) shared.cells[t] = 0;
  });
  for (int rank = 0; rank < s.ranks; ++rank, in += section.rank_words) {
    block.parity(shared.cells + kChecksum, [&](int t) {
      return share(pointer<const u32>(s.powers), first, t, words, kThreads,
                   [&](int w) { return record[w] = in[w]; });
    });
    const u32 heads = record[0], top = heads & 0xFFFFu;
    const bool number = top != kNonFinite;
    const bool legal = !number || (top <= kMaxFinite >> 16 &&
                                   (s.values != kTwoBit || heads >> 16 <= kMaxFinite >> 16));
    finite = finite && number;
    sound = sound && legal;
    if (number && legal && finite && sound) {
      if (s.positions != kAll) read_positions(block, shared, record, positions, s);
      sound = !shared.cells[kDamaged] && !shared.cells[kDisorder];
      const Coder coder(heads, s);
      const bool all = s.positions == kAll, add = sound;
      block.each([&](int t) {
        for (int j = t; add && j < parts; j += kThreads) {
          const int bin = all ? j / kParts : positions[j / kParts];
          const u32 code = get(record, s.head_bits() + j * s.code_bits, s.code_bits);
          coefficient(shared, bin, j % kParts) += coder.decode(code) * s.factor;
        }
      });
    }
    block.each([&](int t) {
      if (t == 0) {
        atomic_xor(pointer<u64>(section.totals) + rank, u64{shared.cells[kChecksum]});
        shared.cells[kChecksum] = 0;
      }
    });
  }
  if (!sound)
    block.each([&](int t) {
      if (t == 0) atomic_or(pointer<u32>(section.memory), static_cast<u32>(kBadRecord));
    });
  const Values values(section, row);
  if (sound && finite) {
    inverse(block, shared, values, twiddles);
  } else {
    block.each([&](int t) {
      const float nan = float_of(kNonFinite << 16);
      for (int m = t; m < kInput / 2; m += kThreads) values.set(m, nan, nan);
    });
  }
}

}  // namespace sn

// Defines both kernels: on the host a loop over thread blocks, where `dynamic` holds the record and
// a list of 16-bit positions; see Format.shared_bytes in ops/launch.py.
#ifdef SN_HOST
#include "host.h"

#define SN_KERNEL(name, body)                                                                       \
  extern "C" void name(i64 blocks, int order, const sn::Sections* table,                            \
                       const sn::Settings* settings, const float* twiddles) {                       \
    sn::run<sn::kThreads, sn::Shared>(                                                              \
        blocks, order, settings->words + (settings->kept + 1) / 2,                                  \
        [&](const sn::Threads& block, sn::Shared& shared, u32* dynamic) {                           \
          sn::body(block, shared, dynamic, *table, *settings,                                       \
                   reinterpret_cast<const sn::Complex*>(twiddles));                                 \
        });                                                                                         \
  }
#else
#define SN_KERNEL(name, body)                                                                       \
  extern "C" __global__ void __launch_bounds__(SN_THREADS, SN_RESIDENT)                             \
      name(const __grid_constant__ sn::Sections table,                                              \
           const __grid_constant__ sn::Settings settings, const sn::Complex* twiddles) {            \
    __shared__ sn::Shared shared;                                                                   \
    extern __shared__ u32 dynamic[];                                                                \
    sn::body(sn::Threads(), shared, dynamic, table, settings, twiddles);                            \
  }
#endif

SN_KERNEL(encode_blocks, encode_block)
SN_KERNEL(decode_blocks, decode_block)
