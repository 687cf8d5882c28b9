// One record over a whole vector, around cuFFT: the coefficients are in device memory, and thread
// blocks of 256 go over them in chunks. Twin: ops/records/record.py. No sort and no wait for the
// host: the threshold is found by three histograms of 11, 10 and 10 bits, and stays on the device.
//
// encode: begin, add_memory, (histogram, choose) x 3, count_marks, offsets, pack, sum_words
// decode: for each rank begin_decode, count_ones_in, offsets, list_positions, check_order,
//         add_values, sum_words
//
// One file, though a long one: the kernels are stages of one pass over one scratch buffer.
#include "section.cuh"

#ifndef SN_PARTS
#error "compile with -DSN_PARTS=2 for complex bins, 1 for real coefficients"
#endif

namespace sn {

constexpr int kThreads = 256, kParts = SN_PARTS;
constexpr int kSlots = 16, kChunk = kSlots * kThreads;  // bins of a block
constexpr int kDigits = 2048;
using Threads = Block<kThreads>;
using Keys = PerThread<u32, kSlots, kThreads>;

// What kernels of one vector tell each other. `settled` is set when a digit's whole bucket stays.
struct State {
  u32 peak, threshold, need, equal, settled, damaged, ones, spare;
  u32 histogram[kDigits];
};

struct Whole {
  u64 coefs;      // [bins, parts] float32
  u64 memory;     // of memory_dtype, or 0
  u64 words;      // the record
  u64 state;
  u64 counts, equals;  // u32 by chunk: turned into sums of those before by `offsets`
  u64 positions;  // decode: i64 [kept]
  u64 totals;     // as in Section; decode: this rank's
  u64 flags;      // decode: u32 error flags
  i64 first_word, chunks;
  i64 edge;       // the last bin's imaginary part, which the inverse ignores, or -1
  int memory_dtype, pass;
};
static_assert(sizeof(Whole) == 104, "as in ops/");

struct Shared {
  u32 histogram[kDigits];
  u32 map[kChunk / 32], before[kChunk / 32 + 1];
  u32 cells[3];
};

SN_DEVICE int shift_of(int pass) { return pass == 0 ? 20 : pass == 1 ? 10 : 0; }
SN_DEVICE int digits_of(int pass) { return pass == 0 ? 2048 : 1024; }

struct Job {
  const Threads& block;
  Shared& shared;
  const Whole& w;
  const Settings& s;

  SN_DEVICE State& state() const { return *pointer<State>(w.state); }
  SN_DEVICE float* coefs() const { return pointer<float>(w.coefs); }
  SN_DEVICE u32* words() const { return pointer<u32>(w.words); }
  SN_DEVICE i64 first() const { return block.index() * kChunk; }
  SN_DEVICE bool finite() const { return state().peak <= kMaxFinite; }
  SN_DEVICE i64 places() const { return s.head_bits() + s.kept * kParts * s.code_bits; }
  SN_DEVICE i64 map_at() const {
    return s.positions == kBitmap ? places() : places() + s.kept * s.low;
  }
  SN_DEVICE i64 map_bits() const {
    return s.positions == kBitmap ? s.bins : upper_bits(s.kept, s.bins, s.low);
  }

  SN_DEVICE void load_keys(Keys& keys) const {
    const float scale = unit_scale(state().peak);
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i) {
        const i64 bin = first() + t + i * kThreads;
        keys(t, i) = 0;
        if (bin >= s.bins) continue;
        if (kParts == 1) {
          keys(t, i) = magnitude(coefs()[bin]);
        } else {
          const float re = coefs()[2 * bin] * scale, im = coefs()[2 * bin + 1] * scale;
          keys(t, i) = bits_of(re * re + im * im);
        }
      }
    });
  }
};

// Words, state and counters to zero; the grid covers words and histogram.
SN_DEVICE void begin_body(const Job& job) {
  job.block.each([&](int t) {
    const i64 i = job.block.index() * kThreads + t;
    if (i < job.s.words) job.words()[i] = 0;
    if (i < kDigits) job.state().histogram[i] = 0;
    if (i == 0) {
      State& state = job.state();
      state.peak = state.threshold = state.settled = state.damaged = state.ones = 0;
      state.need = static_cast<u32>(job.s.kept);
      state.equal = static_cast<u32>(job.s.bins);
      if (job.s.kept == job.s.bins) state.settled = 1;
    }
  });
}

// Four floats of a thread, so that a block has a chunk of 1024.
SN_DEVICE void add_memory_body(const Job& job) {
  const i64 start = job.block.index() * 4 * kThreads, end = job.s.bins * kParts;
  job.block.each([&](int t) {
    if (t == 0) job.shared.cells[0] = 0;
  });
  job.block.max(job.shared.cells, [&](int t) {
    u32 largest = 0;
    SN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const i64 i = start + t + j * kThreads;
      if (i >= end) continue;
      float value = job.coefs()[i];
      if (job.w.memory) {
        const float kept = job.w.memory_dtype == kBfloat16
                               ? from_bfloat(pointer<const u16>(job.w.memory)[i])
                               : pointer<const float>(job.w.memory)[i];
        value += kept * job.s.factor;
        job.coefs()[i] = value;
      }
      const u32 size = magnitude(value);
      if (largest < size) largest = size;
    }
    return largest;
  });
  job.block.each([&](int t) {
    if (t == 0) atomic_max(&job.state().peak, job.shared.cells[0]);
  });
}

SN_DEVICE void histogram_body(const Job& job) {
  const State& state = job.state();
  if (!job.finite() || state.settled) return;
  Keys keys;
  const int shift = shift_of(job.w.pass), digits = digits_of(job.w.pass);
  const int done = job.w.pass == 0 ? 31 : shift + 10;
  job.block.each([&](int t) {
    for (int d = t; d < digits; d += kThreads) job.shared.histogram[d] = 0;
  });
  job.load_keys(keys);
  job.block.each([&](int t) {
    SN_UNROLL
    for (int i = 0; i < kSlots; ++i)
      if (job.first() + t + i * kThreads < job.s.bins && (keys(t, i) ^ state.threshold) >> done == 0)
        atomic_add(job.shared.histogram + (keys(t, i) >> shift & (digits - 1)), 1u);
  });
  job.block.each([&](int t) {
    for (int d = t; d < digits; d += kThreads)
      if (job.shared.histogram[d]) atomic_add(job.state().histogram + d, job.shared.histogram[d]);
  });
}

// One block: the digit in which the last kept bin lies.
SN_DEVICE void choose_body(const Job& job) {
  State& state = job.state();
  if (!job.finite() || state.settled) return;
  const int digits = digits_of(job.w.pass);
  job.block.each([&](int t) {
    for (int d = t; d < digits; d += kThreads) {
      job.shared.histogram[d] = state.histogram[d];
      state.histogram[d] = 0;
    }
  });
  const u32 need = state.need;
  job.block.find_digit(job.shared.histogram, digits, need, job.shared.cells);
  job.block.each([&](int t) {
    if (t) return;
    state.threshold |= job.shared.cells[0] << shift_of(job.w.pass);
    state.need = need - job.shared.cells[1];
    state.equal = job.shared.cells[2];
    state.settled = state.equal == state.need;
  });
}

// counts, equals := bins above and at the threshold, by chunk. Settled: all that reach it are above.
SN_DEVICE void count_marks_body(const Job& job) {
  const State& state = job.state();
  if (!job.finite()) return;
  Keys keys;
  job.block.each([&](int t) {
    if (t < 2) job.shared.cells[t] = 0;
  });
  job.load_keys(keys);
  const u32 threshold = state.threshold, from = threshold + (state.settled ? 0 : 1);
  for (int which = 0; which < 2; ++which)
    job.block.sum(job.shared.cells + which, [&](int t) {
      u32 own = 0;
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i)
        if (job.first() + t + i * kThreads < job.s.bins)
          own += which ? keys(t, i) == threshold && keys(t, i) < from : keys(t, i) >= from;
      return own;
    });
  job.block.each([&](int t) {
    if (t == 0) pointer<u32>(job.w.counts)[job.block.index()] = job.shared.cells[0];
    if (t == 1) pointer<u32>(job.w.equals)[job.block.index()] = job.shared.cells[1];
  });
}

// One block: counts, and equals if there are any, become the sums of those before.
SN_DEVICE void offsets_body(const Job& job) {
  for (int which = 0; which < 2; ++which) {
    u32* values = pointer<u32>(which ? job.w.equals : job.w.counts);
    if (!values) continue;
    u32 carry = 0;
    for (i64 start = 0; start < job.w.chunks; start += kDigits / 2) {
      const int count = job.w.chunks - start < kDigits / 2
                            ? static_cast<int>(job.w.chunks - start) : kDigits / 2;
      u32* own = job.shared.histogram;          // 1024 counts
      u32* before = own + kDigits / 2;          // and the sums
      job.block.each([&](int t) {
        for (int i = t; i < kDigits / 2; i += kThreads) own[i] = i < count ? values[start + i] : 0;
      });
      job.block.sums_before(own, before, kDigits / 2 - 1);
      job.block.each([&](int t) {
        for (int i = t; i < count; i += kThreads) values[start + i] = carry + before[i];
      });
      const u32 total = before[kDigits / 2 - 1] + own[kDigits / 2 - 1];
      job.block.each([&](int) {});  // all have read before the next round writes
      carry += total;
    }
    job.block.each([&](int t) {
      if (t == 0 && which == 0) job.state().ones = carry;
    });
  }
}

SN_DEVICE void pack_body(const Job& job) {
  const State& state = job.state();
  const Threads& block = job.block;
  const Settings& s = job.s;
  u32* words = job.words();
  if (!job.finite()) {
    block.each([&](int t) {
      if (t == 0 && block.index() == 0) atomic_or(words, kNonFinite);
    });
    return;
  }
  Keys keys;
  Shared& shared = job.shared;
  job.load_keys(keys);
  const u32 threshold = state.threshold, from = threshold + (state.settled ? 0 : 1);
  const u32 need = state.settled ? 0 : state.need;
  const u32 equals = state.settled ? 0 : pointer<const u32>(job.w.equals)[block.index()];
  const auto inside = [&](int t, int i) { return job.first() + t + i * kThreads < s.bins; };
  const auto below = [&](int place) {
    const u32 lower = shared.map[place >> 5] & ((1u << (place & 31)) - 1);
    return shared.before[place >> 5] + static_cast<u32>(count_ones(lower));
  };
  if (!state.settled) {  // of the equal ones, the first `need` of the vector stay
    block.ballots<kSlots>(shared.map, [&](int t, int i) {
      return inside(t, i) && keys(t, i) == threshold;
    });
    block.count_before(shared.map, shared.before, kChunk / 32);
    block.each([&](int t) {
      SN_UNROLL
      for (int i = 0; i < kSlots; ++i)
        if (keys(t, i) == threshold)
          keys(t, i) = equals + below(t + i * kThreads) < need ? 0x80000000u : 0;
    });
  }
  block.ballots<kSlots>(shared.map, [&](int t, int i) {
    return inside(t, i) && keys(t, i) >= from;
  });
  block.count_before(shared.map, shared.before, kChunk / 32);
  const u32 rank = pointer<const u32>(job.w.counts)[block.index()] + (equals < need ? equals : need);
  const u32 heads = Coder::head_for(state.peak, s);
  const Coder coder(heads, s);
  const i64 places = job.places(), map = job.map_at();
  block.each([&](int t) {
    if (t == 0 && block.index() == 0) atomic_or(words, heads);
    SN_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      const int place = t + i * kThreads;
      if (!(shared.map[place >> 5] >> (place & 31) & 1u)) continue;
      const i64 bin = job.first() + place, at = rank + below(place);
      for (int part = 0; part < kParts; ++part) {
        float& value = job.coefs()[bin * kParts + part];
        u32 saturated;
        const u32 code = coder.encode(value, saturated);
        if (saturated) atomic_add(pointer<u64>(job.w.totals), u64{1});
        put(words, s.head_bits() + (at * kParts + part) * s.code_bits, code, s.code_bits);
        value -= coder.decode(code);
      }
      if (s.positions == kBitmap) put(words, map + bin, 1u, 1);
      if (s.positions == kEliasFano) {
        put(words, places + at * s.low,
            static_cast<u32>(bin) & static_cast<u32>((u64{1} << s.low) - 1), s.low);
        put(words, map + (bin >> s.low) + at, 1u, 1);
      }
    }
  });
  if (!job.w.memory) return;
  block.each([&](int t) {
    SN_UNROLL
    for (int j = 0; j < kSlots * kParts; ++j) {
      const i64 i = job.first() * kParts + t + j * kThreads;
      if (i >= s.bins * kParts) continue;
      const bool ignored = kParts == 2 && (i == 1 || i == job.w.edge);
      const float left = ignored ? 0.0f : job.coefs()[i];
      if (job.w.memory_dtype == kBfloat16)
        pointer<u16>(job.w.memory)[i] = static_cast<u16>(to_finite_bfloat(left));
      else
        pointer<float>(job.w.memory)[i] = left;
    }
  });
}

// totals[1] ^= the record's share of the checksum; decode: totals[0], its rank's.
SN_DEVICE void sum_words_body(const Job& job) {
  job.block.each([&](int t) {
    if (t == 0) job.shared.cells[0] = 0;
  });
  const i64 start = job.block.index() * 4 * kThreads;
  const i64 left = job.s.words - start;
  const int count = static_cast<int>(left < 4 * kThreads ? left : 4 * kThreads);
  job.block.parity(job.shared.cells, [&](int t) {
    return share(pointer<const u32>(job.s.powers), job.w.first_word + start, t, count, kThreads,
                 [&](int w) { return job.words()[start + w]; });
  });
  job.block.each([&](int t) {
    if (t == 0)
      atomic_xor(pointer<u64>(job.w.totals) + (job.w.flags ? 0 : 1), u64{job.shared.cells[0]});
  });
}

SN_DEVICE void begin_decode_body(const Job& job) {
  job.block.each([&](int t) {
    if (t == 0) job.state().damaged = 0;
  });
}

// counts := ones of the position map by runs of kChunk bits.
SN_DEVICE void load_map(const Job& job) {
  const i64 start = job.block.index() * kChunk, end = job.map_bits();
  job.block.each([&](int t) {
    if (t >= kChunk / 32) return;
    const i64 at = start + 32 * t;
    const int count = end - at >= 32 ? 32 : end - at > 0 ? static_cast<int>(end - at) : 0;
    job.shared.map[t] = get(job.words(), job.map_at() + at, count);
  });
  job.block.count_before(job.shared.map, job.shared.before, kChunk / 32);
}

SN_DEVICE void count_ones_in_body(const Job& job) {
  load_map(job);
  job.block.each([&](int t) {
    if (t == 0) pointer<u32>(job.w.counts)[job.block.index()] = job.shared.before[kChunk / 32];
  });
}

// positions[i] := the i-th position, or -1 where the record holds none.
SN_DEVICE void list_positions_body(const Job& job) {
  load_map(job);
  const Settings& s = job.s;
  job.block.each([&](int t) {
    if (t == 0 && job.block.index() == 0 && job.state().ones != s.kept) job.state().damaged = 1;
    if (t >= kChunk / 32) return;
    i64 i = static_cast<i64>(pointer<const u32>(job.w.counts)[job.block.index()]) +
            job.shared.before[t];
    for (u32 run = job.shared.map[t]; run && i < s.kept; run &= run - 1, ++i) {
      const i64 one = job.block.index() * kChunk + 32 * t + lowest_one(run);
      const i64 bin = s.positions == kBitmap
                          ? one
                          : (one - i) << s.low | get(job.words(), job.places() + i * s.low, s.low);
      pointer<i64>(job.w.positions)[i] = bin;
    }
  });
}

SN_DEVICE void check_order_body(const Job& job) {
  const i64 i = job.block.index() * kThreads;
  const i64* positions = pointer<const i64>(job.w.positions);
  const u32 top = job.words()[0] & 0xFFFFu;
  job.block.each([&](int t) {
    if (i + t == 0 && top != kNonFinite && top > kMaxFinite >> 16)
      atomic_or(&job.state().damaged, 1u);
    if (i + t >= job.s.kept || job.s.positions == kAll || job.state().ones != job.s.kept) return;
    const i64 own = positions[i + t], last = i + t ? positions[i + t - 1] : -1;
    if (own <= last || own >= job.s.bins) atomic_or(&job.state().damaged, 1u);
  });
}

// coefs += factor * the record's values; NaN everywhere if it is not finite or not sound. The grid
// covers the bins, kept ones first.
SN_DEVICE void add_values_body(const Job& job) {
  const Settings& s = job.s;
  const u32 heads = job.words()[0];
  const bool damaged = job.state().damaged, number = (heads & 0xFFFFu) != kNonFinite;
  const Coder coder(damaged || !number ? 0u : heads, s);
  job.block.each([&](int t) {
    const i64 i = job.block.index() * kThreads + t;
    if (number && damaged && i == 0)
      atomic_or(pointer<u32>(job.w.flags), static_cast<u32>(kBadRecord));
    if (damaged || !number) {
      if (i < s.bins)
        for (int part = 0; part < kParts; ++part)
          job.coefs()[i * kParts + part] = float_of(kNonFinite << 16);
      return;
    }
    if (i >= s.kept) return;
    const i64 bin = s.positions == kAll ? i : pointer<const i64>(job.w.positions)[i];
    for (int part = 0; part < kParts; ++part) {
      const i64 at = s.head_bits() + (i * kParts + part) * s.code_bits;
      job.coefs()[bin * kParts + part] +=
          coder.decode(get(job.words(), at, s.code_bits)) * s.factor;
    }
  });
}

}  // namespace sn

#ifdef SN_HOST
#include "host.h"
#define SN_ENTRY(name)                                                                          \
  extern "C" void name(i64 blocks, int order, const sn::Whole* whole, const sn::Settings* s) {  \
    sn::run<sn::kThreads, sn::Shared>(                                                          \
        blocks, order, 0, [&](const sn::Threads& block, sn::Shared& shared, u32*) {             \
          sn::name##_body(sn::Job{block, shared, *whole, *s});                                  \
        });                                                                                     \
  }
#else
#define SN_ENTRY(name)                                                                      \
  extern "C" __global__ void __launch_bounds__(sn::kThreads)                                \
      name(const __grid_constant__ sn::Whole whole, const __grid_constant__ sn::Settings s) { \
    __shared__ sn::Shared shared;                                                           \
    const sn::Threads block;                                                                \
    sn::name##_body(sn::Job{block, shared, whole, s});                                      \
  }
#endif

SN_ENTRY(begin)
SN_ENTRY(add_memory)
SN_ENTRY(histogram)
SN_ENTRY(choose)
SN_ENTRY(count_marks)
SN_ENTRY(offsets)
SN_ENTRY(pack)
SN_ENTRY(sum_words)
SN_ENTRY(begin_decode)
SN_ENTRY(count_ones_in)
SN_ENTRY(list_positions)
SN_ENTRY(check_order)
SN_ENTRY(add_values)
