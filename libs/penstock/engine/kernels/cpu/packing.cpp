// Packs stored matrices and computes checksums of packed files. Each call uses one thread; callers cut up the work.
// The format of packed matrices is described in pack.py, whose `pack` does the same in torch.
#include "kernels.h"

#include <algorithm>
#include <cstring>

namespace penstock {

namespace {

constexpr int kLanes = 16;  // columns in a panel

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return from_bits(sign | ((rest << 13) + ((127 - 15) << 23)));
  const float small = float(rest) * 0x1p-24f;  // a subnormal number or zero
  return sign ? -small : small;
}

// The i-th number of a stored row, as float.
template <Kind stored> inline float number(const char *row, int i) {
  if constexpr (stored == FLOAT32) {
    float value;
    std::memcpy(&value, row + int64_t(i) * 4, 4);
    return value;
  } else {
    uint16_t half;
    std::memcpy(&half, row + int64_t(i) * 2, 2);
    return stored == BFLOAT16 ? from_bits(uint32_t(half) << 16) : from_f16(half);
  }
}

// The i-th number of a stored row, rounded to bfloat16.
template <Kind stored> inline uint16_t rounded(const char *row, int i) {
  if constexpr (stored == BFLOAT16) {
    uint16_t half;
    std::memcpy(&half, row + int64_t(i) * 2, 2);
    return half;
  } else {
    return to_bf16(number<stored>(row, i));
  }
}

typedef uint32_t Words __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
constexpr int kChunk = 32;  // words or bytes of each row that are transposed at a time

template <class Vector> inline Vector load(const void *at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof vector);
  return vector;
}

// Transposes 16 rows of kChunk words to kChunk rows of 16 words: 8 x 8 at a time, in three rounds of interleaving.
inline void turn(const uint32_t (*rows)[kChunk], int words, uint32_t *out) {
  if (words < kChunk) {
    for (int k = 0; k < words; ++k)
      for (int lane = 0; lane < kLanes; ++lane) out[k * kLanes + lane] = rows[lane][k];
    return;
  }
  for (int half = 0; half < kLanes; half += 8)
    for (int k = 0; k < kChunk; k += 8) {
      Words at[8], next[8];
      for (int i = 0; i < 8; ++i) at[i] = load<Words>(&rows[half + i][k]);
      for (int i = 0; i < 4; ++i) {
        next[2 * i] = __builtin_shuffle(at[i], at[i + 4], Words{0, 8, 1, 9, 4, 12, 5, 13});
        next[2 * i + 1] = __builtin_shuffle(at[i], at[i + 4], Words{2, 10, 3, 11, 6, 14, 7, 15});
      }
      // next[2i + h] holds the columns 2h, 2h + 1 and 4 + 2h, 5 + 2h of the rows i and i + 4, row by row.
      for (int h = 0; h < 2; ++h)
        for (int pair = 0; pair < 2; ++pair) {
          at[4 * h + 2 * pair] =
              __builtin_shuffle(next[2 * pair + h], next[2 * (pair + 2) + h], Words{0, 8, 1, 9, 4, 12, 5, 13});
          at[4 * h + 2 * pair + 1] =
              __builtin_shuffle(next[2 * pair + h], next[2 * (pair + 2) + h], Words{2, 10, 3, 11, 6, 14, 7, 15});
        }
      // at[4h + 2p + c] holds column 2h + c (low half) and 4 + 2h + c (high half) of the rows p, p + 2, p + 4, p + 6.
      for (int h = 0; h < 2; ++h)
        for (int c = 0; c < 2; ++c) {
          const Words even = at[4 * h + c], odd = at[4 * h + 2 + c];
          const Words low = __builtin_shuffle(even, odd, Words{0, 8, 1, 9, 2, 10, 3, 11});
          const Words high = __builtin_shuffle(even, odd, Words{4, 12, 5, 13, 6, 14, 7, 15});
          std::memcpy(out + (k + 2 * h + c) * kLanes + half, &low, sizeof low);
          std::memcpy(out + (k + 4 + 2 * h + c) * kLanes + half, &high, sizeof high);
        }
    }
}

// The same for bytes: 16 x 16 at a time, in four rounds that interleave the first half of the rows with the second.
inline void turn(const int8_t (*rows)[kChunk], int bytes, int8_t *out) {
  if (bytes < kChunk) {
    for (int k = 0; k < bytes; ++k)
      for (int lane = 0; lane < kLanes; ++lane) out[k * kLanes + lane] = rows[lane][k];
    return;
  }
  for (int k = 0; k < kChunk; k += kLanes) {
    Bytes at[kLanes], next[kLanes];
    for (int i = 0; i < kLanes; ++i) at[i] = load<Bytes>(&rows[i][k]);
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < 8; ++i) {
        next[2 * i] =
            __builtin_shuffle(at[i], at[i + 8], Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        next[2 * i + 1] =
            __builtin_shuffle(at[i], at[i + 8], Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
      }
      std::memcpy(at, next, sizeof at);
    }
    std::memcpy(out + k * kLanes, at, sizeof at);
  }
}

// Words that hold two bfloat16 each.
template <Kind stored> void pack_bf16(const char *const *rows, int in, uint32_t *out) {
  uint32_t chunk[kLanes][kChunk];
  for (int k = 0; k < in / 2; k += kChunk) {
    const int words = std::min(kChunk, in / 2 - k);
    for (int lane = 0; lane < kLanes; ++lane)
      if constexpr (stored == BFLOAT16)
        std::memcpy(chunk[lane], rows[lane] + int64_t(k) * 4, words * 4);
      else
        for (int i = 0; i < words; ++i)
          chunk[lane][i] =
              rounded<stored>(rows[lane], 2 * (k + i)) | uint32_t(rounded<stored>(rows[lane], 2 * (k + i) + 1)) << 16;
    turn(chunk, words, out + int64_t(k) * kLanes);
  }
}

template <Kind stored> void pack_f32(const char *const *rows, int in, uint32_t *out) {
  uint32_t chunk[kLanes][kChunk];
  for (int k = 0; k < in; k += kChunk) {
    const int words = std::min(kChunk, in - k);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < words; ++i) chunk[lane][i] = to_bits(number<stored>(rows[lane], k + i));
    turn(chunk, words, out + int64_t(k) * kLanes);
  }
}

// The number is rounded to bfloat16 first, because the twin in torch gets it so.
template <Kind stored> void pack_int8(const char *const *rows, int in, int8_t *out, float *scale) {
  constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to a whole number, ties to even
  auto weight = [](const char *row, int i) { return from_bits(uint32_t(rounded<stored>(row, i)) << 16); };
  float step[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t most = 0;  // without the sign, larger numbers have larger bits
    for (int k = 0; k < in; ++k) most = std::max(most, to_bits(weight(rows[lane], k)) & 0x7fffffff);
    scale[lane] = from_bits(most) / 127;
    step[lane] = scale[lane] == 0 ? 1.0f : scale[lane];
  }
  int8_t chunk[kLanes][kChunk];
  for (int k = 0; k < in; k += kChunk) {
    const int bytes = std::min(kChunk, in - k);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < bytes; ++i) {
        const float shifted = weight(rows[lane], k + i) / step[lane] + kRound;  // at most 127 and a rounding error
        chunk[lane][i] = int8_t(std::clamp(int32_t(to_bits(shifted) - to_bits(kRound)), -127, 127));
      }
    turn(chunk, bytes, out + int64_t(k) * kLanes);
  }
}

constexpr int kGroup = 32, kLine = 8;  // inputs in a group of INT4, and in the words of one line
constexpr int kGroupBytes = kLanes * (2 + kGroup / 2);

// Brings the eight numbers of a word, the first in the lowest bits, to where `four_bits` reads them.
inline uint32_t paired(uint32_t word) {
  auto gather = [](uint32_t some) {  // every other nibble, from the lowest on
    some = (some | some >> 4) & 0x00ff00ff;
    return (some | some >> 8) & 0xffff;
  };
  return gather(word & 0x0f0f0f0f) | gather(word >> 4 & 0x0f0f0f0f) << 16;
}

// Writes a group: `scale` gives that of a lane, and `number` the four bits of a lane's input.
template <class Scale, class Number> inline void write_group(Scale scale, Number number, char *out) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint16_t own = scale(lane);
    std::memcpy(out + lane * 2, &own, 2);
    for (int line = 0; line < kGroup / kLine; ++line) {
      uint32_t word = 0;
      for (int i = 0; i < kLine; ++i) word |= number(lane, line * kLine + i) << 4 * i;
      word = paired(word);
      std::memcpy(out + kLanes * 2 + (line * kLanes + lane) * 4, &word, 4);
    }
  }
}

// The numbers are rounded to bfloat16 first, as for int8.
template <Kind stored> void pack_int4(const char *const *rows, int in, char *out) {
  constexpr float kRound = 0x1.8p23f;  // as in pack_int8
  auto weight = [&](int lane, int i) { return from_bits(uint32_t(rounded<stored>(rows[lane], i)) << 16); };
  for (int first = 0; first < in; first += kGroup, out += kGroupBytes) {
    const int some = std::min(kGroup, in - first);
    uint16_t scale[kLanes];
    float step[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t most = 0;
      for (int i = 0; i < some; ++i) most = std::max(most, to_bits(weight(lane, first + i)) & 0x7fffffff);
      scale[lane] = to_bf16(from_bits(most) / 7.5f);
      step[lane] = scale[lane] == 0 ? 1.0f : from_bits(uint32_t(scale[lane]) << 16);
    }
    auto number = [&](int lane, int i) {
      if (i >= some) return 0u;
      const float shifted = weight(lane, first + i) / step[lane] + kRound;
      return uint32_t(std::clamp(int32_t(to_bits(shifted) - to_bits(kRound)), -8, 7)) & 15;
    };
    write_group([&](int lane) { return scale[lane]; }, number, out);
  }
}

template <Kind stored>
void pack(const char *data, int64_t count, int in, Kind kind, char *out, float *scale, const char *zeros) {
  const int64_t row_bytes = int64_t(in) * (stored == FLOAT32 ? 4 : 2);
  const int64_t panel_bytes = kind == INT4 ? int64_t(in + kGroup - 1) / kGroup * kGroupBytes
                                           : int64_t(in) * kLanes *
                                                 (kind == FLOAT32    ? 4
                                                  : kind == BFLOAT16 ? 2
                                                                     : 1);
  for (int64_t first = 0; first < count; first += kLanes, out += panel_bytes, scale += kLanes) {
    const char *rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      rows[lane] = first + lane < count ? data + (first + lane) * row_bytes : zeros;
    if (kind == FLOAT32) pack_f32<stored>(rows, in, reinterpret_cast<uint32_t *>(out));
    if (kind == BFLOAT16) pack_bf16<stored>(rows, in, reinterpret_cast<uint32_t *>(out));
    if (kind == INT8) pack_int8<stored>(rows, in, reinterpret_cast<int8_t *>(out), scale);
    if (kind == INT4) pack_int4<stored>(rows, in, out);
  }
}

// How many words a checksum takes in side by side.
typedef uint32_t Sums __attribute__((vector_size(32)));
constexpr int kSums = 4, kWords = 32;

}  // namespace

extern "C" {

// Packs `count` rows of `in` stored numbers (`in` is even) as columns, filled up to whole panels with columns of zeros.
// `scale` has room for a number per column and is used for int8 only; `zeros` is a row of zeros.
void penstock_pack(const void *rows, int64_t count, int32_t in, int32_t stored, int32_t kind, void *out, float *scale,
                   const void *zeros) {
  const auto *data = static_cast<const char *>(rows), *none = static_cast<const char *>(zeros);
  auto *to = static_cast<char *>(out);
  switch (stored) {
    case FLOAT32: return pack<FLOAT32>(data, count, in, Kind(kind), to, scale, none);
    case BFLOAT16: return pack<BFLOAT16>(data, count, in, Kind(kind), to, scale, none);
    default: return pack<FLOAT16>(data, count, in, Kind(kind), to, scale, none);
  }
}

// Packs `count` rows of `in` numbers that are stored in 4 bits (`in` is even), each as number + 8, as INT4 without
// changing one. `scale` has that of each group of each row, in bfloat16.
void penstock_regroup(const void *rows, int64_t count, int32_t in, const uint16_t *scale, void *out) {
  const int groups = (in + kGroup - 1) / kGroup;
  const auto *data = static_cast<const uint8_t *>(rows);
  auto *to = static_cast<char *>(out);
  for (int64_t first = 0; first < count; first += kLanes)
    for (int at = 0; at < groups; ++at, to += kGroupBytes)
      write_group([&](int lane) { return first + lane < count ? scale[(first + lane) * groups + at] : uint16_t(0); },
                  [&](int lane, int i) {
                    const int input = at * kGroup + i;
                    if (first + lane >= count || input >= in) return 0u;
                    return (data[(first + lane) * (in / 2) + input / 2] >> input % 2 * 4 & 15u) ^ 8;
                  },
                  to);
}

// Computes one number for each block of `block` bytes, and one for the rest behind the last whole block. `bytes` and
// `block` are multiples of 128. Changing any single word changes the number.
void penstock_checksum(const void *data, int64_t bytes, int64_t block, uint64_t *sums) {
  const auto *at = static_cast<const char *>(data);
  for (; bytes > 0; bytes -= block, at += block) {
    Sums running[kSums] = {};
    const int64_t size = std::min(bytes, block);
    for (int64_t i = 0; i < size; i += sizeof running)
      for (int part = 0; part < kSums; ++part)
        running[part] = running[part] * 0x9E3779B1u + load<Sums>(at + i + part * sizeof(Sums));
    uint32_t lanes[kWords];
    std::memcpy(lanes, running, sizeof lanes);
    uint64_t sum = 0;
    for (int lane = 0; lane < kWords; ++lane) sum = sum * 0x9E3779B97F4A7C15u + lanes[lane];
    *sums++ = sum;
  }
}
}

}  // namespace penstock
