// The tables passed to a launch by value: many tensors, one launch, nothing to upload.
// A kernel's arguments hold 4 KiB; ops/launch.py has these structs as dtypes.
#pragma once

#include "coder.cuh"

namespace sn {

// A run of equal blocks of one tensor. Pointers are integers, so that Python can set them.
struct Section {
  u64 values;       // encode: the input; decode: the output
  u64 memory;       // encode: [blocks, floats] of float32, or 0; decode: u32 error flags
  u64 words;        // its first record; decode: that of the first rank
  u64 totals;       // encode: {saturated, CRC's sum} of its payload; decode: u64 sums per rank
  i64 rank_words;   // decode: words from one rank's payload to the next
  i64 elements;     // of `values`; the last block may be cut short
  i64 first_block;  // number of blocks in the sections before
  i64 first_word;   // of its first record in the payload, header included
  int dtype, unused;
};

constexpr int kSections = 48;

struct Sections {
  Section at[kSections];
  i64 count;
};

struct Sheet {
  u64 buffer;      // u32 words; decode: those of the first rank
  u64 totals;      // as in Section
  u64 flags;       // decode: u32 error flags
  i64 rank_words;  // decode: words from one rank's payload to the next
  i64 words;       // per payload
  i64 used;        // words before the padding
  u32 header[6];   // magic to reserved, the same for every rank
  u32 end, unused;  // end: x**(32 words), see crc.cuh
};

struct Sheets {
  Sheet at[kSections];
};

static_assert(sizeof(Section) == 72 && sizeof(Sheet) == 80, "as in ops/");
static_assert(sizeof(Sections) + sizeof(Settings) + 64 <= 4096, "a kernel's arguments");
static_assert(sizeof(Sheets) + 64 <= 4096, "a kernel's arguments");

// Errors found by decoding; flags are only ever added.
enum Damage : u32 { kBadRecord = 1, kBadHeader = 2, kBadChecksum = 4 };

SN_DEVICE const Section& section_of(const Sections& table, i64 block) {
  int low = 0, high = static_cast<int>(table.count);
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (table.at[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  return table.at[low];
}

template <typename T>
SN_DEVICE T* pointer(u64 number) {
  return reinterpret_cast<T*>(number);
}

}  // namespace sn
