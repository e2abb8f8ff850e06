// The inner loops of attention: products of some queries and some keys, and mixes of values.
#pragma once
#include "lanes.h"

#include <cmath>

namespace penstock {

constexpr int kTokens = 8;                            // keys of a call of `scores`
constexpr int kSums = kWidth >= 16 ? 8 : 4;           // that the registers hold, while they also hold what is multiplied
constexpr int kQueriesAtOnce = kWidth >= 16 ? 4 : 2;  // at least so many share each load of a key or value

// How numbers of a cache are read and written. Two vectors at a time are read in the order that is cheapest; `arrange`
// brings a query into this order and `restore` brings a mix back from it.
struct F32Cache {
  using Number = float;
  static inline void read(const float *at, Floats &one, Floats &two) { one = Floats::load(at), two = Floats::load(at + kLanes); }
  static void write(const float *from, int dim, float *to) { std::memcpy(to, from, dim * sizeof(float)); }
  static void arrange(const float *from, int dim, float *to) { std::memcpy(to, from, dim * sizeof(float)); }
  static void restore(const float *from, int dim, float *to) { std::memcpy(to, from, dim * sizeof(float)); }
};

struct Bf16Cache {  // the even numbers of 32, then the odd ones
  using Number = uint16_t;
  static inline void read(const uint16_t *at, Floats &one, Floats &two) { split(reinterpret_cast<const char *>(at), one, two); }
  static void write(const float *from, int dim, uint16_t *to) {
    for (int i = 0; i < dim; ++i) {  // to nearest, ties to even
      uint32_t bits;
      std::memcpy(&bits, from + i, 4);
      const bool nan = (bits & 0x7fffffff) > 0x7f800000;
      to[i] = uint16_t(nan ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
  static void arrange(const float *from, int dim, float *to) {
    for (int i = 0; i < dim; ++i) to[place(i, dim)] = from[i];
  }
  static void restore(const float *from, int dim, float *to) {
    for (int i = 0; i < dim; ++i) to[i] = from[place(i, dim)];
  }

 private:
  static inline int place(int i, int dim) {
    return i < dim / 32 * 32 ? i / 32 * 32 + i % 2 * kLanes + i % 32 / 2 : i;
  }
};

template <class Cache, int count> inline void read(const typename Cache::Number *at, Floats *to) {
  if constexpr (count == 1) to[0] = Floats::load(at);
  for (int i = 0; i + 1 < count; i += 2) Cache::read(at + i * kLanes, to[i], to[i + 1]);
}

// score[q][t] for kTokens tokens: each sum in an order that only `dim` determines.
template <class Cache, int queries>
inline void scores(const typename Cache::Number *const *key, const float *query, int dim, float *score, int stride) {
  constexpr int together = kSums / queries;
  for (int t = 0; t < kTokens; t += together) {
    Floats sum[kSums] = {};  // [queries][together]
    auto add = [&]<int count>(int i) {
      Floats keys[together][count];
      for (int j = 0; j < together; ++j) read<Cache, count>(key[t + j] + i, keys[j]);
      for (int v = 0; v < count; ++v)
        for (int q = 0; q < queries; ++q) {
          const Floats own = Floats::load(query + q * dim + i + v * kLanes);
          for (int j = 0; j < together; ++j) sum[q * together + j].add(own, keys[j][v]);
        }
    };
    int i = 0;
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes) add.template operator()<2>(i);
    if (i < dim) add.template operator()<1>(i);
    float whole[kSums];
    for (int s = 0; s < kSums; s += 4) {
      const FourFloats four = totals(sum + s);
      std::memcpy(whole + s, &four, sizeof four);
    }
    for (int q = 0; q < queries; ++q) std::memcpy(score + q * stride + t, whole + q * together, together * sizeof(float));
  }
}

// mixed[q][i ...] += weight[q][t] * value[t][i ...] of `count` vectors; the mixes are `apart` floats from each other
template <class Cache, int queries, int count>
inline void mix_vectors(const typename Cache::Number *const *value, int tokens, const float *weight, int stride, int i, int apart, float *mixed) {
  Floats sum[queries][count];
  for (int q = 0; q < queries; ++q)
    for (int v = 0; v < count; ++v) sum[q][v] = Floats::load(mixed + q * apart + i + v * kLanes);
  for (int t = 0; t < tokens; ++t) {
    Floats values[count];
    read<Cache, count>(value[t] + i, values);
    for (int q = 0; q < queries; ++q)
      for (int v = 0; v < count; ++v) sum[q][v].add(values[v], weight[q * stride + t]);
  }
  for (int q = 0; q < queries; ++q)
    for (int v = 0; v < count; ++v) sum[q][v].store(mixed + q * apart + i + v * kLanes);
}

// mixed[q] += weight[q][t] * value[t], one token after the other
template <class Cache, int queries>
inline void mix(const typename Cache::Number *const *value, int tokens, const float *weight, int stride, int dim, int apart, float *mixed) {
  constexpr int many = queries == 1 ? 4 : 2;
  int i = 0;
  for (; i + many * kLanes <= dim; i += many * kLanes) mix_vectors<Cache, queries, many>(value, tokens, weight, stride, i, apart, mixed);
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) mix_vectors<Cache, queries, 2>(value, tokens, weight, stride, i, apart, mixed);
  if (i < dim) mix_vectors<Cache, queries, 1>(value, tokens, weight, stride, i, apart, mixed);
}

}  // namespace penstock
