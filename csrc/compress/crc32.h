// CRC-32 of IEEE 802.3, as in zlib, eight bytes at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sn {

// The CRC of bytes that follow others whose CRC is `before`.
inline uint32_t crc32_on(uint32_t before, const void* data, size_t bytes) {
  using Tables = std::array<std::array<uint32_t, 256>, 8>;
  static const Tables tables = [] {
    Tables made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0u);
      made[0][i] = value;
    }
    for (size_t level = 1; level < 8; ++level)
      for (size_t i = 0; i < 256; ++i)
        made[level][i] = made[level - 1][i] >> 8 ^ made[0][made[level - 1][i] & 255];
    return made;
  }();
  auto at = static_cast<const unsigned char*>(data);
  uint32_t value = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= value;
    value = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
            tables[4][low >> 24] ^ tables[3][high & 255] ^ tables[2][high >> 8 & 255] ^
            tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
  }
  for (; bytes; --bytes, ++at) value = value >> 8 ^ tables[0][(value ^ *at) & 255];
  return ~value;
}

inline uint32_t crc32(const void* data, size_t bytes) { return crc32_on(0, data, bytes); }

}  // namespace sn
