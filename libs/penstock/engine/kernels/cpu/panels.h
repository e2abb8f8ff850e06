// Reads packed panels: the weights of two inputs for 16 columns at a time, as floats or as pairs of bfloat16.
#pragma once
#include "kernels.h"
#include "lanes.h"

#include <climits>

namespace penstock {

constexpr int kGroup = 32;                            // inputs in a group of a panel of LOSSLESS or INT4
constexpr int kGroupBytes = 48, kVerbatimBytes = 64;  // bytes of a pair of inputs of LOSSLESS
constexpr int kScaleBytes = 32;                       // of a group of INT4: a bfloat16 for each column
constexpr int kLinePairs = 4, kLineBytes = 64;        // pairs of inputs of INT4 that lie in the same words; their bytes
constexpr int kLines = kGroup / 2 / kLinePairs;       // in a group

// Prefetches what follows a little later in a panel, also across the end of a page of memory, where the processor's own
// prefetching stops.
template <int bytes> inline void prefetch(const char *at) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + 2048 + line);
}

template <Kind kind> struct Reader;

struct Plain {
  static constexpr int kRun = INT_MAX;    // inputs that can be read after one call of `enter`
  static constexpr int kLine = 1;         // pairs that can be read after one call of `line`
  static constexpr bool kScaled = false;  // whether what is read is to be multiplied by `scale`
  const char *at;
  inline void enter() {}
  inline void line() {}
  static inline const char *panel(const Linear &matrix, int panel, int pair_bytes) {
    return static_cast<const char *>(matrix.data) + int64_t(panel) * (matrix.inputs / 2) * pair_bytes;
  }
};

template <> struct Reader<FLOAT32> : Plain {
  Reader() = default;
  Reader(const Linear &matrix, int number, int from) : Plain{panel(matrix, number, 128) + int64_t(from) * 64} {}
  explicit Reader(const float *room) : Plain{reinterpret_cast<const char *>(room)} {}
  inline void ahead() const { prefetch<128>(at); }
  inline void next(Floats &even, Floats &odd) {
    even = Floats::load(reinterpret_cast<const float *>(at));
    odd = Floats::load(reinterpret_cast<const float *>(at) + kLanes);
    at += 128;
  }
};

template <> struct Reader<BFLOAT16> : Plain {
  Reader() = default;
  Reader(const Linear &matrix, int number, int from) : Plain{panel(matrix, number, 64) + int64_t(from) * 32} {}
  inline void ahead() const { prefetch<64>(at); }
  explicit Reader(const float *room) : Plain{reinterpret_cast<const char *>(room)} {}
  inline Pairs next() {
    at += 64;
    return Pairs::load(at - 64);
  }
  inline void next(Floats &even, Floats &odd) { next().split(even, odd); }
};

template <> struct Reader<INT8> : Plain {
  Reader() = default;
  Reader(const Linear &matrix, int number, int from) : Plain{panel(matrix, number, 32) + int64_t(from) * 16} {}
  inline void ahead() const { prefetch<32>(at); }
  inline void next(Floats &even, Floats &odd) {
    even = Floats::load(reinterpret_cast<const int8_t *>(at));
    odd = Floats::load(reinterpret_cast<const int8_t *>(at) + kLanes);
    at += 32;
  }
  inline Pairs next() {
    Floats even, odd;
    next(even, odd);
    return Pairs::of(even, odd);
  }
};

// A panel begins with one bit for each group, which is set if the group is verbatim; see lossless.py.
template <> struct Reader<LOSSLESS> {
  static constexpr int kRun = kGroup, kLine = 1;
  static constexpr bool kScaled = false;
  const char *at;
  const uint8_t *bits, *parts;
  int group;
  bool verbatim;

  Reader() = default;
  Reader(const Linear &matrix, int number, int from) : parts(matrix.parts), group(from / kGroup) {
    bits = static_cast<const uint8_t *>(matrix.data) + matrix.start[number];
    const int groups = (matrix.inputs + kGroup - 1) / kGroup;
    at = reinterpret_cast<const char *>(bits) + (groups + 127) / 128 * 16;
    int kept = 0;
    for (int i = 0; i < group; ++i) kept += bits[i / 8] >> i % 8 & 1;
    at += int64_t(group) * (kGroup / 2) * kGroupBytes + int64_t(kept) * (kGroup / 2) * (kVerbatimBytes - kGroupBytes);
  }
  inline void enter() {
    verbatim = bits[group / 8] >> group % 8 & 1;
    ++group;
  }
  inline void line() {}
  inline void ahead() const { prefetch<kGroupBytes>(at); }
  inline Pairs next() {
    if (__builtin_expect(verbatim, 0)) {
      at += kVerbatimBytes;
      return Pairs::load(at - kVerbatimBytes);
    }
    at += kGroupBytes;
    return restore(at - kGroupBytes, parts);
  }
#if defined(__AVX512BW__)
  // Reads a whole group that is compressed.
  inline void whole(char *to) {
    for (int pair = 0; pair < kGroup / 2; pair += 2, at += 2 * kGroupBytes, to += 128) {
      for (int line = 0; line < 2 * kGroupBytes; line += 48) __builtin_prefetch(at + 2048 + line);
      restore_two(at, at + kGroupBytes, parts, to);
    }
  }
#endif
  inline void next(Floats &even, Floats &odd) { next().split(even, odd); }
};

// A panel is whole groups: its scales, then lines of words, see pack.py. What is read are the numbers, which are exact
// in bfloat16.
template <> struct Reader<INT4> {
  static constexpr int kRun = kGroup, kLine = kLinePairs, kBytes = kScaleBytes + kLines * kLineBytes;
  static constexpr bool kScaled = true;
  const char *at;     // the next group
  const char *words;  // the next line of the group that was entered
  int pair;           // the next one in it
  Floats scale;       // of the group

  Reader() = default;
  Reader(const Linear &matrix, int number, int from) {
    const int64_t groups = (matrix.inputs + kGroup - 1) / kGroup;
    at = static_cast<const char *>(matrix.data) + (number * groups + from / kGroup) * kBytes;
  }
  inline void enter() {
    scale = Floats::load(reinterpret_cast<const uint16_t *>(at));
    words = at + kScaleBytes, pair = 0, at += kBytes;
  }
  inline void line() { pair = 0; }  // says what is so anyway, and the compiler knows it then
  inline void ahead() const {
    if (pair == 0) prefetch<kLineBytes>(words);
  }
  inline void next(Floats &even, Floats &odd) { four_bits(words, pair, even, odd), step(); }
#if defined(__AVX512BF16__)
  inline Pairs next() {
    const Pairs both = four_bits(words, pair);
    step();
    return both;
  }
#endif

 private:
  inline void step() {
    if (++pair == kLinePairs) pair = 0, words += kLineBytes;
  }
};

// Numbers of INT4 that were unpacked to `kind`; their scales are where they were.
template <Kind kind> struct Numbers : Reader<kind> {
  static constexpr int kRun = kGroup;
  static constexpr bool kScaled = true;
  const char *group;  // the next one
  Floats scale;

  Numbers() = default;
  Numbers(const float *room, const Reader<INT4> &packed) : Reader<kind>(room), group(packed.at) {}
  inline void enter() {
    scale = Floats::load(reinterpret_cast<const uint16_t *>(group));
    group += Reader<INT4>::kBytes;
  }
};

}  // namespace penstock
