// The most probable of some tokens.
#pragma once
#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace penstock {

constexpr int kWordBits = 32;

// The first of the largest numbers; -1 when these are infinite, or no numbers.
inline int best(const float *logits, int vocab) {
  const int whole = vocab / kLanes * kLanes;
  float most = logits[0];
  if (whole) {
    Floats high = Floats::load(logits);
    for (int i = kLanes; i < whole; i += kLanes) high.most(Floats::load(logits + i));
    most = high.highest();
  }
  for (int i = whole; i < vocab; ++i) most = std::max(most, logits[i]);
  return std::isfinite(most) ? int(std::find(logits, logits + vocab, most) - logits) : -1;
}

// The same among the tokens whose bits are set in `legal`, the lowest bit of the first word first.
inline int best(const float *logits, int vocab, const uint32_t *legal) {
  const int words = (vocab + kWordBits - 1) / kWordBits;
  auto bits_of = [&](int word) {
    const int some = vocab - word * kWordBits;
    return some < kWordBits ? legal[word] & ((1u << some) - 1) : legal[word];
  };
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  Floats high = Floats::all(kLeast);
  float most = kLeast;
  for (int word = 0; word < words; ++word) {
    const uint32_t bits = bits_of(word);
    const float *own = logits + word * kWordBits;
    if (bits == ~0u)
      for (int i = 0; i < kWordBits; i += kLanes) high.most(Floats::load(own + i));
    else
      for (uint32_t left = bits; left; left &= left - 1) most = std::max(most, own[__builtin_ctz(left)]);
  }
  most = std::max(most, high.highest());
  if (!std::isfinite(most)) return -1;
  for (int word = 0; word < words; ++word)
    for (uint32_t left = bits_of(word); left; left &= left - 1)
      if (const int token = word * kWordBits + __builtin_ctz(left); logits[token] == most) return token;
  return -1;
}

}  // namespace penstock
