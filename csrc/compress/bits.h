// Converts a float32 to its bits, eight bytes of 0 or 1 to the bits of one byte, and both back.
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

// The lowest byte becomes the lowest bit.
inline uint8_t squeezed(const uint8_t* eight) {
  uint64_t w;
  std::memcpy(&w, eight, 8);
  w |= w >> 7;
  w |= w >> 14;
  return static_cast<uint8_t>(w | w >> 28);
}

inline void spread(uint8_t bits, uint8_t* eight) {
  uint64_t w = bits;
  w = (w | w << 28) & 0x0000000F0000000Full;
  w = (w | w << 14) & 0x0003000300030003ull;
  w = (w | w << 7) & 0x0101010101010101ull;
  std::memcpy(eight, &w, 8);
}

}  // namespace sn
