// Records of long spectra, straight from and to the plane of long_fourier.h: a run of bins at a
// time, so that nothing of the size of the vector is made beside the plane. Same bits as record.h.
#pragma once

#include <cstdint>
#include <vector>

#include "long_fourier.h"
#include "record.h"

namespace sn {

// One record of the plane, whose peak `rows_forward` gave. Values::range and Values::half only,
// whose codes need no more of a block than its peak. memory: [bins] complex, becomes the residual,
// or null; words: [layout.words]. A peak that is not finite leaves the memory as it is.
Tally encode_long(const Split& split, const float* plane, uint32_t peak, float* memory,
                  uint32_t* words, const Layout& layout, int64_t top);

enum class Decoded { good, damaged, not_finite };

// Adds weight * what a record holds to the plane.
Decoded decode_long(const Split& split, const uint32_t* words, const Layout& layout, float weight,
                    float* plane);

}  // namespace sn
