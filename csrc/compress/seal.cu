// Headers of payloads, before and after their records: codecs/base.py, Payload.seal.
// The records' contribution to the checksum is summed where they are written or read, in fused.cu,
// so no payload is read twice.
#include "section.cuh"

namespace sn {

constexpr int kThreads = 128;
using Threads = Block<kThreads>;
constexpr int kSaturatedWord = 6, kChecksumWord = 7;

// The contribution of a word of the header or the padding: words 0 to 6, then those from `used` on.
// A CRC starts with all ones, which inverts the first word.
SN_DEVICE u32 share_of_frame(const Sheet& sheet, const u32* words, const u32* powers, i64 i) {
  const i64 w = i < kChecksumWord ? i : sheet.used + i - kChecksumWord;
  return product(i == 0 ? ~words[0] : words[w], step_back(powers, w));
}

// Writes the header except for its counts, and zeros after the records; resets the counters.
SN_DEVICE void open_payload(const Threads& block, const Sheet& sheet, int, const u32*) {
  u32* words = pointer<u32>(sheet.buffer);
  block.each([&](int t) {
    if (t < 6) words[t] = sheet.header[t];
    if (t < 2) words[kSaturatedWord + t] = 0, pointer<u64>(sheet.totals)[t] = 0;
    for (i64 w = sheet.used + t; w < sheet.words; w += kThreads) words[w] = 0;
  });
}

SN_DEVICE void seal_payload(const Threads& block, const Sheet& sheet, int, const u32* powers) {
  u32* words = pointer<u32>(sheet.buffer);
  u64* totals = pointer<u64>(sheet.totals);
  block.each([&](int t) {
    if (t == 0)
      words[kSaturatedWord] = totals[0] < 0xFFFFFFFFu ? static_cast<u32>(totals[0]) : 0xFFFFFFFFu;
  });
  block.each([&](int t) {  // the padding is zero
    if (t < kChecksumWord) atomic_xor(totals + 1, u64{share_of_frame(sheet, words, powers, t)});
  });
  block.each([&](int t) {
    if (t == 0) words[kChecksumWord] = ~product(static_cast<u32>(totals[1]), sheet.end);
  });
}

SN_DEVICE void open_check(const Threads& block, const Sheet& sheet, int ranks, const u32*) {
  block.each([&](int t) {
    for (int rank = t; rank < ranks; rank += kThreads) pointer<u64>(sheet.totals)[rank] = 0;
  });
}

// Sets flags if a header is not as expected, or a checksum is wrong.
SN_DEVICE void check_payload(const Threads& block, const Sheet& sheet, int ranks,
                             const u32* powers) {
  const u32* first = pointer<const u32>(sheet.buffer);
  u64* totals = pointer<u64>(sheet.totals);
  const i64 frame = kChecksumWord + sheet.words - sheet.used;
  block.each([&](int t) {  // all words of all ranks in parallel
    for (i64 i = t; i < frame * ranks; i += kThreads) {
      const i64 rank = i / frame;
      const u32* words = first + rank * sheet.rank_words;
      atomic_xor(totals + rank, u64{share_of_frame(sheet, words, powers, i % frame)});
    }
  });
  block.each([&](int t) {
    for (int rank = t; rank < ranks; rank += kThreads) {
      const u32* words = first + rank * sheet.rank_words;
      const u32 found = ~product(static_cast<u32>(totals[rank]), sheet.end);
      u32 damage = found == words[kChecksumWord] ? 0u : static_cast<u32>(kBadChecksum);
      for (int i = 0; i < 6; ++i)
        if (words[i] != sheet.header[i]) damage |= kBadHeader;
      if (damage) atomic_or(pointer<u32>(sheet.flags), damage);
    }
  });
}

}  // namespace sn

// Defines the four kernels, with a thread block per payload.
#ifdef SN_HOST
#include "host.h"

#define SN_KERNEL(name, body)                                                                       \
  extern "C" void name(i64 count, int order, const sn::Sheets* table, int ranks,                    \
                       const u32* powers) {                                                         \
    sn::run<sn::kThreads, int>(count, order, 0, [&](const sn::Threads& block, int&, u32*) {         \
      sn::body(block, table->at[block.index()], ranks, powers);                                     \
    });                                                                                             \
  }
#else
#define SN_KERNEL(name, body)                                                                       \
  extern "C" __global__ void name(const __grid_constant__ sn::Sheets table, int ranks,              \
                                  const u32* powers) {                                              \
    sn::body(sn::Threads(), table.at[blockIdx.x], ranks, powers);                                   \
  }
#endif

SN_KERNEL(open_payloads, open_payload)
SN_KERNEL(seal_payloads, seal_payload)
SN_KERNEL(open_checks, open_check)
SN_KERNEL(check_payloads, check_payload)
