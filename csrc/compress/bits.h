// A float32 as its bits, and back.
#pragma once

#include <cstdint>
#include <cstring>

namespace sn {

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace sn
