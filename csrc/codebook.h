// The formats' code tables for host and device: the same values as nf4linear/formats.py, tested equal to them.
//
// A format is a type with the values of its stored codes; engines are templates over it and never branch on the format.
#ifndef NF4LINEAR_CODEBOOK_H
#define NF4LINEAR_CODEBOOK_H

#include <stdint.h>

#include "layout.h"
#include "nf4linear.h"

namespace nf4l {

// Centroids are bitsandbytes' own, exact in float32 (QLoRA, arXiv 2305.14314, appendix E).
struct Nf4 {
  static constexpr int FORMAT = NF4L_NF4;
  static constexpr int ZERO_CODE = 7;  // fills padding rows
  NF4L_HD static constexpr float value(int code) {
    constexpr float table[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    };
    return table[code];
  }
};

// e2m1 scaled to 1; the sign is the high bit, and code 8 is minus zero.
struct Fp4 {
  static constexpr int FORMAT = NF4L_FP4;
  static constexpr int ZERO_CODE = 0;
  NF4L_HD static constexpr float value(int code) {
    constexpr float magnitude[8] = {
        0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f,
        0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
    };
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
  }
};

// Signed 8 bit, stored offset-binary (value XOR 0x80).
struct W8S8 {
  static constexpr int FORMAT = NF4L_W8_S8;
  static constexpr int BIAS = 128;  // value = stored byte - BIAS; also the stored byte of 0
  NF4L_HD static constexpr float value(int stored) { return static_cast<float>(stored - BIAS); }
};

// Unsigned 8 bit, stored as is.
struct W8U8 {
  static constexpr int FORMAT = NF4L_W8_U8;
  static constexpr int BIAS = 0;
  NF4L_HD static constexpr float value(int stored) { return static_cast<float>(stored - BIAS); }
};

// bitsandbytes multiplies the raw row maximum of an 8-bit weight by this float32 instead of dividing by 127.
constexpr float INV_127 = 1.0f / 127.0f;

}  // namespace nf4l

#endif
