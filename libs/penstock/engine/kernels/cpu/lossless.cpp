// Compresses bfloat16 panels; see lossless.py for the format.
#include "panels.h"

#include <cstring>

namespace penstock {

namespace {

constexpr int kPairs = kGroup / 2;

struct Panels {
  const uint16_t *words;  // [panels, pairs, 32]
  int panels, pairs;
  int groups() const { return (pairs + kPairs - 1) / kPairs; }
  int header() const { return (groups() + 127) / 128 * 16; }
  const uint16_t *panel(int number) const { return words + int64_t(number) * pairs * 32; }
  int length(int group) const { return pairs - group * kPairs < kPairs ? pairs - group * kPairs : kPairs; }
};

inline uint8_t exponent(uint16_t word) { return uint8_t(word >> 7); }

bool verbatim(const uint16_t *words, int count, const uint8_t *index) {
  for (int i = 0; i < count; ++i)
    if (index[exponent(words[i])] == 255) return true;
  return false;
}

// The word from which a pair's byte `at` comes, in the order in which 128-bit registers interleave bytes.
constexpr int word_of(int at) { return at / 8 % 2 * 16 + at / 16 * 8 + at % 8; }

void pack_pair(const uint16_t *words, const uint8_t *index, uint8_t *out) {
  for (int at = 0; at < 32; ++at) {
    const uint16_t word = words[word_of(at)];
    out[at] = uint8_t((word >> 8 & 0x80) | (word & 0x7f));
  }
  for (int at = 0; at < 16; ++at)
    out[32 + at] = uint8_t(index[exponent(words[word_of(at)])] | index[exponent(words[word_of(at + 16)])] << 4);
}

void compress(const Panels &panels, int number, const uint8_t *index, uint8_t *out) {
  const uint16_t *words = panels.panel(number);
  uint8_t *bits = out;
  std::memset(bits, 0, panels.header());
  out += panels.header();
  for (int group = 0; group < panels.groups(); ++group) {
    const int pairs = panels.length(group);
    const bool kept = verbatim(words, pairs * 32, index);
    if (kept) bits[group / 8] |= uint8_t(1 << group % 8);
    for (int pair = 0; pair < pairs; ++pair, words += 32)
      if (kept)
        std::memcpy(out, words, kVerbatimBytes), out += kVerbatimBytes;
      else
        pack_pair(words, index, out), out += kGroupBytes;
  }
}

}  // namespace

void count_exponents(const uint16_t *words, int64_t count, int64_t *counts) {
  for (int64_t i = 0; i < count; ++i) ++counts[exponent(words[i])];
}

void lossless_sizes(const uint16_t *words, int panels, int pairs, const uint8_t *index, int64_t *sizes) {
  const Panels all{words, panels, pairs};
  for (int number = 0; number < panels; ++number) {
    sizes[number] = all.header() + int64_t(pairs) * kGroupBytes;
    for (int group = 0; group < all.groups(); ++group)
      if (verbatim(all.panel(number) + int64_t(group) * kPairs * 32, all.length(group) * 32, index))
        sizes[number] += all.length(group) * (kVerbatimBytes - kGroupBytes);
  }
}

void compress(const uint16_t *words, int panels, int pairs, const uint8_t *index, const int64_t *start, uint8_t *out) {
  const Panels all{words, panels, pairs};
  for (int number = 0; number < panels; ++number) compress(all, number, index, out + start[number]);
}

}  // namespace penstock
