#include "codes.h"

#include <algorithm>
#include <cstring>

#include "half.h"
#include "lanes.h"
#include "pack.h"

namespace sn {
namespace {

SN_CLONES int32_t range_run(const Window& given, float* values, uint32_t* codes, int64_t count) {
  const Window window = given;  // a copy, which cannot alias the writes to `values`
  int32_t saturated = 0;
  for (int64_t i = 0; i < count; ++i) codes[i] = window.encode(values[i], saturated);
  for (int64_t i = 0; i < count; ++i) values[i] -= window.decode(codes[i]);
  return saturated;
}

}  // namespace

void to_codes(const Window& window, float* values, uint32_t* codes, int64_t count,
              int64_t& saturated) {
  constexpr int64_t kRun = 1 << 20;  // the count of a run fits a vector lane's 32 bits
  for (int64_t i = 0; i < count; i += kRun)
    saturated += range_run(window, values + i, codes + i, std::min(kRun, count - i));
}

void to_codes(const HalfScale& half, float* values, uint32_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = half.encode(values[i]);
    values[i] -= half.decode(codes[i]);
  }
}

SN_CLONES void from_codes(const Window& given, const uint32_t* codes, float weight, float* values,
                          int64_t count) {
  const Window window = given;
  for (int64_t i = 0; i < count; ++i) values[i] = window.decode(codes[i]) * weight;
}

void put_codes(uint32_t* words, int64_t at, const uint32_t* codes, int64_t count, int bits) {
  if (bits == 8) {  // as below
    auto* bytes = reinterpret_cast<uint8_t*>(words) + at / 8;
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
    return;
  }
  Writer writer(words, at);
  for (int64_t i = 0; i < count; ++i) writer.put(codes[i], bits);
  writer.flush();
}

void get_codes(const uint32_t* words, int64_t at, uint32_t* codes, int64_t count, int bits) {
  if (bits == 8) {  // whole bytes (as are heads), the usual case: vectorized
    const auto* bytes = reinterpret_cast<const uint8_t*>(words) + at / 8;
    for (int64_t i = 0; i < count; ++i) codes[i] = bytes[i];
    return;
  }
  Reader reader(words, at);
  for (int64_t i = 0; i < count; ++i) codes[i] = reader.get(bits);
}

SN_CLONES void through_half(const float* values, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = through_half(values[i]);
}

}  // namespace sn
