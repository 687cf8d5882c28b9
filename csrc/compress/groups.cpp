#include "groups.h"

#include <algorithm>
#include <cmath>

#include "bits.h"
#include "groups_loops.h"
#include "tiles.h"

namespace sn {
namespace {

inline float upper(float value) {  // rounds up to a number with a lower half of zeros
  return from_bits((to_bits(value) + 0xFFFF) & 0xFFFF0000u);
}

int index_of(int bits) { return bits == 8 ? 3 : bits / 2; }

const Loops* loops_of(Form form) {
  if (form == Form::kPlain) return &plain_loops();
  if (form == Form::kAvx2) return avx2_loops();
  if (form == Form::kAvx512) return avx512_loops();
  const Loops* vectors = avx512_loops() ? avx512_loops() : avx2_loops();
  return vectors ? vectors : &plain_loops();
}

// Packs several groups at a time: choosing a grid is a chain of divisions, and those of several
// groups run in parallel.
class Packer {
 public:
  Packer(Floats kind, const Grid& grid, const Loops& loops, const Packed& to, Escapes& escapes)
      : kind_(kind), grid_(grid), loops_(loops), to_(to), escapes_(escapes) {}

  // Group g has `size` values, the first at position `at`; its codes begin at byte `byte`. The
  // values must stay valid until flush().
  void add(const void* values, int64_t size, int64_t at, int64_t g, int64_t byte) {
    jobs_[waiting_] = {values, size, at, g, byte};
    if (++waiting_ == kJobs || size > kRun) flush();
  }

  void flush() {
    const int kind = static_cast<int>(kind_);
    for (int i = 0; i < waiting_; ++i)
      if (!loops_.range[kind](jobs_[i].values, jobs_[i].size, seen_[i]))
        seen_[i] = extremes_of(jobs_[i].values, kind_, jobs_[i].size);
    loops_.grids(seen_, waiting_, levels_, cap_, places_);
    for (int i = 0; i < waiting_; ++i) {
      const Extremes& seen = seen_[i];
      bool zeros_escape = levels_ == 1 && about_zero(seen) && few_zeros(jobs_[i], seen);
      if (zeros_escape) {
        places_[i] = choose({seen.low, seen.high, false, seen.fits}, 1, cap_);
        zeros_escape = places_[i].base == seen.low;
      }
      round(jobs_[i], seen, places_[i], zeros_escape);
    }
    waiting_ = 0;
  }

  // Packs groups interleaved in lines, the first as in add(), each next one `run` positions,
  // `groups` groups and `bytes` bytes further; false if they do not qualify.
  bool beside(const Lines<const uint8_t>& lines, int64_t size, int64_t at, int64_t g, int64_t byte,
              int64_t run, int64_t groups, int64_t bytes) {
    const PackBeside pack = loops_.pack[static_cast<int>(kind_)][index_][to_.spread != nullptr];
    if (!pack || !std::isinf(grid_.bound) || run % 2 || size * grid_.bits % 32) return false;
    Luck luck[kLine / 2];
    const int64_t count = kLine / width_of(kind_);
    for (int64_t r = 0; r < count; ++r) luck[r] = luck_at(at + run * r);
    const Beside to = {size, to_.bases + g, to_.steps + g, to_.spread ? to_.spread + g : nullptr,
                       to_.codes + byte, groups, bytes};
    if (!pack(lines, luck, cap_, to)) return false;
    for (int64_t i = 0; to_.spread && i < size; ++i)
      escapes_.zeros += zeros_of(lines.first + lines.stride * i, kind_, count);
    return true;
  }

 private:
  static constexpr int kJobs = 8;

  struct Job {
    const void* values;
    int64_t size, at, g, byte;
  };

  static bool about_zero(const Extremes& seen) {
    return seen.zero && seen.low < 0 && seen.high > 0;
  }

  // Two points with zero cover one sign only: whether zeros are fewer than the elements of either
  // sign. If so, zeros escape.
  bool few_zeros(const Job& job, const Extremes& seen) {
    const auto* values = static_cast<const uint8_t*>(job.values);
    const int64_t zeros = zeros_of(job.values, kind_, job.size);
    int64_t below = 0;
    for (int64_t i = 0; i < job.size; i += kRun) {
      const int64_t here = std::min(kRun, job.size - i);
      const float* run = widened(values + width_of(kind_) * i, kind_, here, scratch_);
      for (int64_t j = 0; j < here; ++j)
        below += run[j] < 0 && (to_bits(run[j]) & 0x7FFFFFFF) < kUnfit;
    }
    return zeros < std::min(below, seen.fits - zeros - below);
  }

  void round(const Job& job, const Extremes& seen, const Place& place, bool zeros_escape) {
    to_.bases[job.g] = place.base;
    to_.steps[job.g] = static_cast<uint16_t>(to_bits(place.step) >> 16);
    uint32_t unread = 0;
    uint32_t* spread = to_.spread ? to_.spread + job.g : &unread;
    *spread = 0;
    if (to_.spread && seen.zero) escapes_.zeros += zeros_of(job.values, kind_, job.size);
    // A grid spanning its group contains all of it: nothing escapes, so nothing is checked.
    const bool whole = seen.fits == job.size && std::isinf(grid_.bound) &&
                       (levels_ > 1 || !about_zero(seen)) && place.step < cap_;
    const RoundLoop loop = loops_.round[static_cast<int>(kind_)][index_][to_.spread != nullptr];
    const auto* values = static_cast<const uint8_t*>(job.values);
    uint8_t* codes = to_.codes + job.byte;
    for (int64_t i = 0; i < job.size; i += kRun) {
      const int64_t here = std::min(kRun, job.size - i);
      const void* run = values + width_of(kind_) * i;
      if (whole)
        loop(run, here, place, luck_at(job.at + i), codes, spread);
      else
        check(run, here, job.at + i, place, zeros_escape, codes, spread);
      codes += (here * grid_.bits + 7) / 8;
    }
  }

  Luck luck_at(int64_t at) const {
    const auto pair = static_cast<uint64_t>(at) >> 1;
    const uint32_t other = grid_.other + static_cast<uint32_t>(pair >> 32) * 0x85EBCA6Bu;
    return {static_cast<uint32_t>(pair), grid_.key, other, (at & 1) != 0};
  }

  // For groups in which elements may escape.
  void check(const void* values, int64_t count, int64_t at, const Place& place, bool zeros_escape,
             uint8_t* codes, uint32_t* spread) {
    const float* run = widened(values, kind_, count, scratch_);
    const int32_t lost =
        quantise(run, static_cast<int32_t>(count), place, grid_.bits, grid_.bound,
                 zeros_escape ? 1 : 0, drawn_.draw(luck_at(at), count), wide_, bad_, spread);
    side_by_side(wide_, count, grid_.bits, codes);
    for (int64_t j = 0; lost && j < count; ++j)
      if (bad_[j]) escapes_.found.push_back({at + j, run[j]});
  }

  const Floats kind_;
  const Grid& grid_;
  const Loops& loops_;
  const Packed& to_;
  Escapes& escapes_;
  const int levels_ = (1 << grid_.bits) - 1, index_ = index_of(grid_.bits);
  const float cap_ = from_bits(to_bits(std::min(grid_.bound, from_bits(kUnfit))) & 0xFFFF0000u);
  uint8_t wide_[kRun], bad_[kRun];
  Drawn drawn_;
  float scratch_[kRun];
  Job jobs_[kJobs];
  Extremes seen_[kJobs];
  Place places_[kJobs];
  int waiting_ = 0;
};

Place place_of(const Packed& from, int64_t g) {
  return {from.bases[g], from_bits(static_cast<uint32_t>(from.steps[g]) << 16)};
}

// Vector instructions convert the NaNs of a corrupt payload to other bits than half.h.
bool sound(const Place& place) { return std::isfinite(place.base) && std::isfinite(place.step); }

// Decodes the values of a group whose codes begin at byte `byte`.
void unpack(const Packed& from, int bits, const Loops& loops, Floats kind, int64_t size, int64_t g,
            int64_t byte, void* values) {
  const Place place = place_of(from, g);
  const ValueLoop loop = (sound(place) ? loops : plain_loops()).values[static_cast<int>(kind)];
  const int64_t width = width_of(kind);
  const uint8_t* codes = from.codes + byte;
  for (int64_t i = 0; i < size; i += kRun) {
    const int64_t here = std::min(kRun, size - i);
    uint8_t spread[kRun];
    if (bits < 8) spread_codes(codes, here, bits, spread);
    loop(bits < 8 ? spread : codes, here, place, static_cast<uint8_t*>(values) + width * i);
    codes += (here * bits + 7) / 8;
  }
}

// Packs or unpacks all groups: one(memory, size, at, g, byte) does one, as in Packer::add(), and
// done() follows after several. A permuted tensor goes in tiles; if a tile's rows fill lines of
// memory, beside(lines, size, at, g, byte, groups, bytes) may do all of it and return true.
template <bool back, typename Byte, typename ByLines, typename One, typename Done>
void each_group(const Runs& runs, int64_t group, int bits, int64_t width, Byte* memory,
                ByLines beside, One one, Done done) {
  const int64_t run = runs.length;
  if (!runs.turn) {
    int64_t size = 0, byte = 0;
    for (int64_t start = 0, g = 0; start < runs.count; start += size, ++g) {
      size = std::min(group, run - start % run);
      one(memory + width * start, size, runs.first + start, g, byte);
      byte += (size * bits + 7) / 8;
    }
    return done();
  }
  const Turn& turn = *runs.turn;
  const int64_t first = runs.first / run, rows = runs.count / run;
  const int64_t groups = (run + group - 1) / group, bytes = (run * bits + 7) / 8;
  const bool all = first % turn.rows == 0 && rows % turn.rows == 0;
  Tile tile;
  const auto move = [&](const Block& block) {
    if (width == 4)
      move_block<4, back>(turn, block, memory, tile);
    else
      move_block<2, back>(turn, block, memory, tile);
  };
  each_block(turn, first, rows, run, group, width, [&](const Block& block) {
    const int64_t kept = block.row - first, g = kept * groups + block.start / group;
    const int64_t at = block.row * run + block.start, byte = kept * bytes + block.start * bits / 8;
    if (turn.near_row == 1 && block.rows * width == kLine) {
      const Lines<Byte> lines = lines_of(turn, block, width, all, memory);
      if (lines.first && beside(lines, block.size, at, g, byte, groups, bytes)) return;
    }
    if (!back) move(block);
    for (int64_t r = 0; r < block.rows; ++r)
      one(tile.memory + kTileRun * width * r, block.size, at + run * r, g + groups * r,
          byte + bytes * r);
    done();
    if (back) move(block);
  });
}

}  // namespace

// Zero is on the grid if the group has one; see choose() in ops/groups.py for the reasons.
Place choose(const Extremes& seen, int levels, float cap) {
  const float low = seen.low, high = seen.high, top = static_cast<float>(levels);
  const bool zero = seen.zero;
  const bool both = low < 0 && high > 0;
  const bool lattice = zero && low < 0;
  float step, below = 0;
  if (!lattice) {
    step = (high - low) / top;
  } else if (!both) {
    below = top;
    step = -low / top;
  } else if (levels == 1) {
    below = -low > high ? 1.0f : 0.0f;
    step = -low > high ? -low : high;
  } else {
    const float share = std::floor(top * -low / (high - low));
    const float a = std::min(std::max(share, 1.0f), top - 1);
    const float b = std::min(std::max(share + 1, 1.0f), top - 1);
    const float step_a = std::max(-low / a, high / (top - a));
    const float step_b = std::max(-low / b, high / (top - b));
    below = step_a <= step_b ? a : b;
    step = std::min(step_a, step_b);
  }
  step = std::max(upper(step), from_bits(kFinest << 16));
  if (step <= cap) return {lattice ? -below * step : low, step};
  step = cap;
  if (low >= 0) return {low, step};
  if (!both) return {zero ? -top * step : high - top * step, step};
  const float half = std::floor((top + 1) / 2);
  const float left = std::ceil(-low / step), right = std::ceil(high / step);
  below = left <= half ? left : right <= half ? top - right : half;
  return {-below * step, step};
}

bool form_runs(Form form) { return loops_of(form) != nullptr; }

void pack_groups(const void* values, Floats kind, const Runs& runs, const Grid& grid, Form form,
                 const Packed& to, Escapes& escapes) {
  Packer packer(kind, grid, *loops_of(form), to, escapes);
  each_group<false>(
      runs, grid.group, grid.bits, width_of(kind), static_cast<const uint8_t*>(values),
      [&](const Lines<const uint8_t>& lines, int64_t size, int64_t at, int64_t g, int64_t byte,
          int64_t groups, int64_t bytes) {
        return packer.beside(lines, size, at, g, byte, runs.length, groups, bytes);
      },
      [&](const uint8_t* row, int64_t size, int64_t at, int64_t g, int64_t byte) {
        packer.add(row, size, at, g, byte);
      },
      [&] { packer.flush(); });
  if (runs.turn)
    std::sort(escapes.found.begin(), escapes.found.end(),
              [](const Escape& a, const Escape& b) { return a.at < b.at; });
}

void unpack_groups(const Packed& from, const Runs& runs, int bits, int64_t group, Form form,
                   void* values, Floats kind) {
  const Loops& loops = *loops_of(form);
  const UnpackBeside beside = loops.unpack[static_cast<int>(kind)][index_of(bits)];
  each_group<true>(
      runs, group, bits, width_of(kind), static_cast<uint8_t*>(values),
      [&](const Lines<uint8_t>& lines, int64_t size, int64_t, int64_t g, int64_t byte,
          int64_t groups, int64_t bytes) {
        if (!beside || size * bits % 32) return false;
        for (int64_t r = 0; r < kLine / width_of(kind); ++r)
          if (!sound(place_of(from, g + groups * r))) return false;
        beside({size, from.bases + g, from.steps + g, nullptr, from.codes + byte, groups, bytes},
               lines);
        return true;
      },
      [&](uint8_t* row, int64_t size, int64_t, int64_t g, int64_t byte) {
        unpack(from, bits, loops, kind, size, g, byte, row);
      },
      [] {});
}

}  // namespace sn
