// Headers of payloads, before and after their records: codec.py, Payload.seal and checksum.
// The records' share of the checksum is summed where they are written and read, in fused.cu and
// whole.cu, so no payload is read twice.
#include "section.cuh"

namespace sn {

using Threads = Block<32>;
constexpr int kHeaderWords = 8, kSaturatedWord = 6, kChecksumWord = 7;

// Sum of (2i + 1) * word_i over words 0..6.
SN_DEVICE u32 header_sum(const u32* words) {
  u32 sum = 0;
  for (int i = 0; i < kChecksumWord; ++i) sum += (2 * i + 1) * words[i];
  return sum;
}

// Header but for its counts, zeros behind the records, no counts yet.
SN_DEVICE void open_payload(const Threads& block, const Sheet& sheet) {
  u32* words = pointer<u32>(sheet.buffer);
  block.each([&](int t) {
    if (t < 6) words[t] = sheet.header[t];
    if (t < 2) words[kSaturatedWord + t] = 0, pointer<u64>(sheet.totals)[t] = 0;
    for (i64 w = sheet.used + t; w < sheet.words; w += 32) words[w] = 0;
  });
}

SN_DEVICE void seal_payload(const Threads& block, const Sheet& sheet) {
  block.each([&](int t) {
    if (t) return;
    u32* words = pointer<u32>(sheet.buffer);
    const u64* totals = pointer<u64>(sheet.totals);
    words[kSaturatedWord] = totals[0] < 0xFFFFFFFFu ? static_cast<u32>(totals[0]) : 0xFFFFFFFFu;
    words[kChecksumWord] = static_cast<u32>(totals[1]) + header_sum(words);
  });
}

SN_DEVICE void open_check(const Threads& block, const Sheet& sheet, int ranks) {
  block.each([&](int t) {
    for (int rank = t; rank < ranks; rank += 32) pointer<u64>(sheet.totals)[rank] = 0;
  });
}

// Raises flags where a header is not the expected one or a checksum is wrong.
SN_DEVICE void check_payload(const Threads& block, const Sheet& sheet, int ranks) {
  block.each([&](int t) {
    for (int rank = t; rank < ranks; rank += 32) {
      const u32* words = pointer<const u32>(sheet.buffer) + rank * sheet.rank_words;
      u32 sum = header_sum(words) + static_cast<u32>(pointer<const u64>(sheet.totals)[rank]);
      for (i64 w = sheet.used; w < sheet.words; ++w)
        sum += (2 * static_cast<u32>(w) + 1) * words[w];
      u32 damage = sum == words[kChecksumWord] ? 0u : static_cast<u32>(kBadChecksum);
      for (int i = 0; i < 6; ++i)
        if (words[i] != sheet.header[i]) damage |= kBadHeader;
      if (damage) atomic_or(pointer<u32>(sheet.flags), damage);
    }
  });
}

}  // namespace sn

#ifdef SN_HOST
#include "host.h"

namespace {
template <typename Body>
void sheets(i64 count, int order, Body body) {
  sn::run<32, int>(count, order, 0,
                   [&](const sn::Threads& block, int&, u32*) { body(block, block.index()); });
}
}  // namespace

extern "C" void open_payloads(i64 count, int order, const sn::Sheets* table) {
  sheets(count, order, [&](const auto& block, i64 i) { sn::open_payload(block, table->at[i]); });
}
extern "C" void seal_payloads(i64 count, int order, const sn::Sheets* table) {
  sheets(count, order, [&](const auto& block, i64 i) { sn::seal_payload(block, table->at[i]); });
}
extern "C" void open_checks(i64 count, int order, const sn::Sheets* table, int ranks) {
  sheets(count, order,
         [&](const auto& block, i64 i) { sn::open_check(block, table->at[i], ranks); });
}
extern "C" void check_payloads(i64 count, int order, const sn::Sheets* table, int ranks) {
  sheets(count, order,
         [&](const auto& block, i64 i) { sn::check_payload(block, table->at[i], ranks); });
}

#else

extern "C" __global__ void open_payloads(const __grid_constant__ sn::Sheets table) {
  sn::open_payload(sn::Threads(), table.at[blockIdx.x]);
}
extern "C" __global__ void seal_payloads(const __grid_constant__ sn::Sheets table) {
  sn::seal_payload(sn::Threads(), table.at[blockIdx.x]);
}
extern "C" __global__ void open_checks(const __grid_constant__ sn::Sheets table, int ranks) {
  sn::open_check(sn::Threads(), table.at[blockIdx.x], ranks);
}
extern "C" __global__ void check_payloads(const __grid_constant__ sn::Sheets table, int ranks) {
  sn::check_payload(sn::Threads(), table.at[blockIdx.x], ranks);
}

#endif
