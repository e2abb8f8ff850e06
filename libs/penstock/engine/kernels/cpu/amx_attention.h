// Attention of up to 16 queries over a piece of a context in bfloat16, in tiles.
//
// Scores are computed transposed, with a row for each token and a column for each query. So keys are read where they
// are, the softmax of a query stays in its column, and pairs of rows already have the layout of the weights' tiles.
#pragma once
#include "amx.h"

namespace penstock {

constexpr int kTileQueries = 16;

// Transposes 16 rows of 16 words.
inline void transpose(__m512i *row) {
  __m512i half[16];
  for (int i = 0; i < 16; i += 2) {
    half[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(half[i + j], half[i + 2 + j]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(half[i + j], half[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      half[8 * j + i] = _mm512_shuffle_i32x4(row[8 * j + i], row[8 * j + 4 + i], 0x88);
      half[8 * j + 4 + i] = _mm512_shuffle_i32x4(row[8 * j + i], row[8 * j + 4 + i], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    row[i] = _mm512_shuffle_i32x4(half[i], half[8 + i], 0x88);
    row[8 + i] = _mm512_shuffle_i32x4(half[i], half[8 + i], 0xdd);
  }
}

// Transposes the values of 32 tokens to to[dim][32]; rows are `apart` numbers apart. Behind the last of `count` tokens
// it writes zeros, because the memory there may hold NaN.
inline void turn_values(const uint16_t *const *value, int count, int dim, uint16_t *to, int apart) {
  for (int i = 0; i < dim; i += 32) {
    __m512i low[16], high[16];
    for (int pair = 0; pair < 16; ++pair) {
      auto of = [&](int token) {
        return token < count ? _mm512_loadu_si512(value[token] + i) : _mm512_setzero_si512();
      };
      const __m512i even = of(2 * pair), odd = of(2 * pair + 1), first = _mm512_unpacklo_epi16(even, odd),
                    second = _mm512_unpackhi_epi16(even, odd);
      low[pair] = _mm512_permutex2var_epi64(first, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second);
      high[pair] = _mm512_permutex2var_epi64(first, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), second);
    }
    transpose(low), transpose(high);
    for (int j = 0; j < 16; ++j) {
      _mm512_store_si512(to + int64_t(i + j) * apart, low[j]);
      _mm512_store_si512(to + int64_t(i + 16 + j) * apart, high[j]);
    }
  }
}

// Writes a query as one column of the tiles: column[dim / 2][16] pairs of bfloat16.
inline void turn_query(const float *query, int dim, uint32_t *column) {
  alignas(32) uint16_t rounded[kLanes];
  for (int i = 0; i < dim; i += kLanes) {
    Floats::load(query + i).round(rounded);
    for (int j = 0; j < kLanes; j += 2) std::memcpy(column + int64_t(i + j) / 2 * kTileQueries, rounded + j, 4);
  }
}

inline void tiles_for_attention(TileShapes &shapes) { shapes.set({16, 16, 16, 16, 16, 16, 16, 16}); }

// Computes score[token][16] for n groups of 16 tokens, n at most 4; the keys of one group are `apart` bytes apart.
template <int n>
inline void score_tokens(const uint16_t *const *key, int64_t apart, int dim, const uint32_t *columns, float *score) {
  tile_zero<0>();
  if constexpr (n > 1) tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int i = 0; i < dim; i += kTileInputs) {
    tile_load<4>(columns + i / 2 * kTileQueries, 64);
    tile_load<5>(key[0] + i, apart), tile_add<0, 5, 4>();
    if constexpr (n > 1) {
      tile_load<6>(key[1] + i, apart), tile_add<1, 6, 4>();
      tile_load<7>(key[2] + i, apart), tile_add<2, 7, 4>();
      tile_load<5>(key[3] + i, apart), tile_add<3, 5, 4>();
    }
  }
  tile_store<0>(score, 64);
  if constexpr (n > 1) tile_store<1>(score + 256, 64), tile_store<2>(score + 512, 64), tile_store<3>(score + 768, 64);
}

// The range of tokens that each of 16 queries sees, counted from the first score.
struct Sight {
  __m512i begin, end;
  int always_from, always_to;  // the range that every query sees
  inline __m512 hide(int token, __m512 score, __m512 hidden) const {
    if (token >= always_from && token < always_to) return score;
    const __m512i at = _mm512_set1_epi32(token);
    const __mmask16 seen = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmplt_epi32_mask(at, end);
    return _mm512_mask_blend_ps(seen, hidden, score);
  }
};

// e^x for x of at most 0, to three parts in a million: a weight is rounded to bfloat16. The polynomial is a minimax fit
// of e^r for |r| up to ln 2 / 2 that is 1 at 0. NaN stays NaN.
inline __m512 weight_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);  // to nearest
  const __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693147181f), x);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0415138416f), r, _mm512_set1_ps(0.167874739f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.50003016f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99996686f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

// Turns score[count][16] into weights e^(score - most), stored as pairs of tokens in bfloat16, and sums the weights.
// `count` is even.
inline void weigh_tokens(const float *score, int count, const Sight &sight, uint32_t *weight, Floats &most,
                         Floats &sum) {
  const __m512 never = _mm512_set1_ps(-1e30f);
  __m512 high[2] = {never, never};
  for (int t = 0; t < count; t += 2)
    for (int i = 0; i < 2; ++i)
      high[i] = _mm512_max_ps(high[i], sight.hide(t + i, _mm512_load_ps(score + (t + i) * kTileQueries), never));
  most.part[0] = (FloatPart)_mm512_max_ps(high[0], high[1]);
  Floats sums[2] = {};
  for (int t = 0; t < count; t += 2) {
    Floats both[2];
    for (int i = 0; i < 2; ++i) {
      const __m512 below = _mm512_sub_ps(_mm512_load_ps(score + (t + i) * kTileQueries), (__m512)most.part[0]);
      both[i].part[0] = (FloatPart)sight.hide(t + i, weight_of(below), _mm512_setzero_ps());
      sums[i] += both[i];
    }
    const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)both[1].part[0], (__m512)both[0].part[0]);
    const __m512i mixed =
        _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                                 pair);
    _mm512_store_si512(weight + t / 2 * kTileQueries, mixed);
  }
  sum = sums[0] + sums[1];
}

// Computes mixed[16 * tiles][16] for 32 or 64 dimensions (two or four tiles) from transposed values of `blocks` blocks
// of 32 tokens.
template <int tiles>
inline void mix_tokens(const uint16_t *values, int64_t apart, int blocks, const uint32_t *weight, float *mixed) {
  tile_zero<0>(), tile_zero<1>();
  if constexpr (tiles > 2) tile_zero<2>(), tile_zero<3>();
  for (int block = 0; block < blocks; ++block) {
    const uint16_t *at = values + block * kTileInputs;
    tile_load<7>(weight + block * 16 * kTileQueries, 64);
    tile_load<4>(at, apart), tile_add<0, 4, 7>();
    tile_load<5>(at + 16 * apart / 2, apart), tile_add<1, 5, 7>();
    if constexpr (tiles > 2) {
      tile_load<6>(at + 32 * apart / 2, apart), tile_add<2, 6, 7>();
      tile_load<4>(at + 48 * apart / 2, apart), tile_add<3, 4, 7>();
    }
  }
  tile_store<0>(mixed, 64), tile_store<1>(mixed + 256, 64);
  if constexpr (tiles > 2) tile_store<2>(mixed + 512, 64), tile_store<3>(mixed + 768, 64);
}

// The same for 32 dimensions and two times 16 queries, the others' weights `others` numbers behind: every loaded tile
// of values is used twice. Computes mixed[2][32][16].
inline void mix_twice(const uint16_t *values, int64_t apart, int blocks, const uint32_t *weight, int64_t others,
                      float *mixed) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int block = 0; block < blocks; ++block) {
    const uint16_t *at = values + block * kTileInputs;
    const uint32_t *own = weight + block * 16 * kTileQueries;
    tile_load<6>(own, 64);
    tile_load<4>(at, apart), tile_add<0, 4, 6>();
    tile_load<5>(at + 16 * apart / 2, apart), tile_add<1, 5, 6>();
    tile_load<7>(own + others, 64);
    tile_add<2, 4, 7>(), tile_add<3, 5, 7>();
  }
  tile_store<0>(mixed, 64), tile_store<1>(mixed + 256, 64);
  tile_store<2>(mixed + 512, 64), tile_store<3>(mixed + 768, 64);
}

}  // namespace penstock
