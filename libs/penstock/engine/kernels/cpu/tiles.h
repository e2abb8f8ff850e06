// The inner loops of attention: products of some queries with some keys, and mixes of values.
#pragma once
#include "lanes.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace penstock {

constexpr int kTokens = 8;                    // keys in one call of `scores`
constexpr int kSums = kWidth >= 16 ? 8 : 4;   // sums that the registers hold beside the factors
constexpr int kMixes = kWidth >= 16 ? 4 : 2;  // queries whose mixes the registers hold

// How numbers of each KV type are read and written. Two vectors are read at a time, in the cheapest order; `arrange`
// brings a query into this order, and `restore` brings a mix back to the natural order.
struct F32Cache {
  using Number = float;
  static constexpr bool kPairs = false;  // numbers are multiplied as they are
  static constexpr int kScale = 0;       // room of a vector's scale, in numbers
  static inline void read(const float *at, Floats &one, Floats &two) {
    one = Floats::load(at), two = Floats::load(at + kLanes);
  }
  static void write(const float *__restrict from, int dim, float *__restrict to) {
    std::memcpy(to, from, dim * sizeof(float));
  }
  static void arrange(const float *__restrict from, int dim, float *__restrict to) {
    std::memcpy(to, from, dim * sizeof(float));
  }
  static void restore(const float *__restrict from, int dim, float *__restrict to) {
    std::memcpy(to, from, dim * sizeof(float));
  }
};

struct Bf16Cache {  // of 32 numbers it reads the even ones, then the odd ones
  using Number = uint16_t;
  static constexpr bool kPairs = false;
  static constexpr int kScale = 0;
  static inline void read(const uint16_t *at, Floats &one, Floats &two) { Pairs::load(at).split(one, two); }
  static void write(const float *from, int dim, uint16_t *to) {
    for (int i = 0; i < dim; ++i) {  // to nearest, ties to even
      uint32_t bits;
      std::memcpy(&bits, from + i, 4);
      const bool nan = (bits & 0x7fffffff) > 0x7f800000;
      to[i] = uint16_t(nan ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
  static void arrange(const float *__restrict from, int dim, float *__restrict to) {
    int i = 0;
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes)
      for (int j = 0; j < kLanes; ++j) to[i + j] = from[i + 2 * j], to[i + kLanes + j] = from[i + 2 * j + 1];
    for (; i < dim; ++i) to[i] = from[i];
  }
  static void restore(const float *__restrict from, int dim, float *__restrict to) {
    int i = 0;
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes)
      for (int j = 0; j < kLanes; ++j) to[i + 2 * j] = from[i + j], to[i + 2 * j + 1] = from[i + kLanes + j];
    for (; i < dim; ++i) to[i] = from[i];
  }
};

// The same numbers, for processors that multiply pairs of them. Queries and weights are rounded too, and the mix is in
// the order of `interleave`.
struct PairsCache : Bf16Cache {
  static constexpr bool kPairs = true;
  static void arrange(const float *from, int dim, float *to) {
    auto *rounded = reinterpret_cast<uint16_t *>(to);
    for (int i = 0; i < dim; i += kLanes) Floats::load(from + i).round(rounded + i);
  }
  static void restore(const float *__restrict from, int dim, float *__restrict to) {
    for (int i = 0; i < dim; i += 2 * kLanes)
      for (int j = 0; j < kLanes; ++j) {
        const int column = i + j / 4 * 8 + j % 4;
        to[column] = from[i + j], to[column + 4] = from[i + kLanes + j];
      }
  }
};

struct Int8Cache {
  using Number = int8_t;
  static constexpr bool kPairs = false;
  static constexpr int kScale = sizeof(float);
  static inline void read(const int8_t *at, Floats &one, Floats &two) {
    one = Floats::load(at), two = Floats::load(at + kLanes);
  }
  // Returns the scale. The result is that of int8_kv.to_rows.
  static float write(const float *__restrict from, int dim, int8_t *__restrict to) {
    float most = 0;
    for (int i = 0; i < dim; ++i) most = std::max(most, std::fabs(from[i]));
    const float scale = most / 127, safe = scale == 0 ? 1 : scale;
    for (int i = 0; i < dim; ++i) to[i] = int8_t(std::clamp(std::nearbyint(from[i] / safe), -127.0f, 127.0f));
    return scale;
  }
  static void arrange(const float *__restrict from, int dim, float *__restrict to) {
    std::memcpy(to, from, dim * sizeof(float));
  }
  static void restore(const float *__restrict from, int dim, float *__restrict to) {
    std::memcpy(to, from, dim * sizeof(float));
  }
};

#define INLINE __attribute__((always_inline))

// Calls work(0), work(1)... with constants, so that the compiler keeps arrays of vectors in registers.
template <int count, class Work> INLINE inline void each(Work work) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      INLINE { (work(std::integral_constant<int, i>()), ...); }(std::make_integer_sequence<int, count>());
}

template <class Cache, int count> INLINE inline void read(const typename Cache::Number *at, Floats *to) {
  if constexpr (count == 1)
    to[0] = Floats::load(at);
  else
    each<count / 2>([&](auto i) INLINE { Cache::read(at + i * 2 * kLanes, to[i * 2], to[i * 2 + 1]); });
}

// Computes score[q][t] for kTokens tokens. The order of each sum depends on the dimension alone. `fixed` is the
// dimension if the compiler knows it, else 0.
template <class Cache, int queries, int fixed>
INLINE inline void scores(const typename Cache::Number *const *key, const float *query, int any, float *score,
                          int stride) {
  constexpr int together = kSums / queries;
  const int dim = fixed ? fixed : any;
  for (int t = 0; t < kTokens; t += together) {
    Floats sum[kSums] = {};  // [queries][together]
    auto add = [&](int i, auto count) INLINE {
      Floats keys[together][count];
      each<together>([&](auto j) INLINE {
        read<Cache, count>(key[t + j] + i, keys[j]);
        if constexpr (queries > 1) each<count>([&](auto v) INLINE { keys[j][v].hold(); });
      });
      each<count>([&](auto v) INLINE {
        each<queries>([&](auto q) INLINE {
          Floats own = Floats::load(query + q * dim + i + v * kLanes);
          if constexpr (together > 1) own.hold();  // loaded once for all keys
          each<together>([&](auto j) INLINE { sum[q * together + j].add(own, keys[j][v]); });
        });
      });
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    int i = 0;
#pragma GCC unroll 4
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes) add(i, two);
    if (i < dim) add(i, one);
    float whole[kSums];
    for (int s = 0; s < kSums; s += 4) {
      const FourFloats four = totals(sum + s);
      std::memcpy(whole + s, &four, sizeof four);
    }
    each<queries>([&](auto q)
                      INLINE { std::memcpy(score + q * stride + t, whole + q * together, together * sizeof(float)); });
  }
}

// Computes mixed[q][i...] += weight[q][t] * value[t][i...] for `count` vectors; the mixes are `apart` floats apart.
template <class Cache, int queries, int count>
INLINE inline void mix_vectors(const typename Cache::Number *const *value, int tokens, const float *weight, int stride,
                               int i, int apart, float *mixed) {
  Floats sum[queries * count];
  each<queries * count>([&](auto s)
                            INLINE { sum[s] = Floats::load(mixed + s / count * apart + i + s % count * kLanes); });
  for (int t = 0; t < tokens; ++t) {
    Floats values[count];
    read<Cache, count>(value[t] + i, values);
    each<queries * count>([&](auto s) INLINE { sum[s].add(values[s % count], weight[s / count * stride + t]); });
  }
  each<queries * count>([&](auto s) INLINE { sum[s].store(mixed + s / count * apart + i + s % count * kLanes); });
}

// Computes mixed[q] += weight[q][t] * value[t], one token after the other.
template <class Cache, int queries, int fixed>
INLINE inline void mix(const typename Cache::Number *const *value, int tokens, const float *weight, int stride, int any,
                       int apart, float *mixed) {
  constexpr int many = queries == 1 ? 4 : 2;
  const int dim = fixed ? fixed : any;
  int i = 0;
  for (; i + many * kLanes <= dim; i += many * kLanes)
    mix_vectors<Cache, queries, many>(value, tokens, weight, stride, i, apart, mixed);
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes)
    mix_vectors<Cache, queries, 2>(value, tokens, weight, stride, i, apart, mixed);
  if (i < dim) mix_vectors<Cache, queries, 1>(value, tokens, weight, stride, i, apart, mixed);
}

// The products of `scores` for pairs of bfloat16.
template <int queries, int fixed>
INLINE inline void score_pairs(const uint16_t *const *key, const float *query, int any, float *score, int stride) {
  constexpr int together = kSums / queries;
  const int dim = fixed ? fixed : any;
  for (int t = 0; t < kTokens; t += together) {
    Floats sum[kSums] = {};  // [queries][together]
#pragma GCC unroll 4
    for (int i = 0; i < dim; i += 2 * kLanes) {
      Pairs keys[together];
      each<together>([&](auto j) INLINE { keys[j] = Pairs::load(key[t + j] + i); });
      each<queries>([&](auto q) INLINE {
        const Pairs own = Pairs::load(query + q * dim + i / 2);
        each<together>([&](auto j) INLINE { add_pairs(sum[q * together + j], own, keys[j]); });
      });
    }
    float whole[kSums];
    for (int s = 0; s < kSums; s += 4) {
      const FourFloats four = totals(sum + s);
      std::memcpy(whole + s, &four, sizeof four);
    }
    each<queries>([&](auto q)
                      INLINE { std::memcpy(score + q * stride + t, whole + q * together, together * sizeof(float)); });
  }
}

// The products of `mix` for `pairs` pairs of tokens: weight[q][t], weight[q][t + 1] with value[t], value[t + 1].
template <int queries, int fixed>
INLINE inline void mix_pairs(const uint16_t *const *value, int pairs, const uint16_t *weight, int stride, int any,
                             int apart, float *mixed) {
  const int dim = fixed ? fixed : any;
  for (int i = 0; i < dim; i += 2 * kLanes) {
    Floats sum[queries * 2];
    each<queries * 2>([&](auto s) INLINE { sum[s] = Floats::load(mixed + s / 2 * apart + i + s % 2 * kLanes); });
    for (int pair = 0; pair < pairs; ++pair) {
      Pairs values[2];
      interleave(value[2 * pair] + i, value[2 * pair + 1] + i, values[0], values[1]);
      each<queries>([&](auto q) INLINE {
        float both;
        std::memcpy(&both, weight + q * stride + 2 * pair, sizeof both);
        add_pairs(sum[q * 2], values[0], both), add_pairs(sum[q * 2 + 1], values[1], both);
      });
    }
    each<queries * 2>([&](auto s) INLINE { sum[s].store(mixed + s / 2 * apart + i + s % 2 * kLanes); });
  }
}

#undef INLINE

}  // namespace penstock
