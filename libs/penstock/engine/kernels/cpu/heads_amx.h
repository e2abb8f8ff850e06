// Attention of few queries over keys and values in bfloat16, in tiles, for neighbouring key heads at once.
//
// A decoding row has few queries in a key head, often three or four, and a tile has columns for sixteen. So the heads
// share the columns: each query is a column whose numbers are zero where the keys of other heads are. Adding zeros
// changes no sum, so the bits are those of head_amx.h, and one pass of the softmax serves all heads. Keys and values of
// neighbouring heads are neighbours in memory, so a context is read from front to back.
#pragma once
#include "amx_attention.h"
#include "head.h"

namespace penstock {

class HeadsInTiles : public Head<HeadsInTiles, Bf16Cache> {
 public:
  // From `kv_head` on so many heads, which have at most kTileQueries queries together.
  HeadsInTiles(const Model &model, const Step &step, int layer, int sequence, int kv_head, int heads, const float *qkv,
               Room room)
      : Head(model, step, layer, sequence, kv_head, qkv, room, 0, kTileQueries / 2 * heads * model.head_dim),
        heads_(heads),
        columns_(reinterpret_cast<uint32_t *>(query_)),
        score_(room.take(kPiece * kTileQueries)),
        weight_(reinterpret_cast<uint32_t *>(room.take(kPiece / 2 * kTileQueries))),
        value_(reinterpret_cast<uint32_t *>(room.take(16 * kValueDims))) {}
  static int64_t room(const Model &model) {
    return own_room(model, 0, int64_t(kTileQueries) / 2 * model.kv_heads * model.head_dim) +
           kPiece * 3 / 2 * kTileQueries + 16 * kValueDims;
  }

  // How many key heads with so many queries each can be looked at together.
  static int together(int queries, int kv_heads) { return std::min(kTileQueries / queries, kv_heads); }

  // Writes to `to` what the queries see in a piece: [heads, queries] of Seen::size floats.
  void look(int piece, float *to) {
    count_ = queries();
    const int size = Seen::size(dim_), all = heads_ * count_;
    std::fill_n(to, int64_t(all) * size, 0.0f);
    const Span span = span_of(piece);
    if (span.begin >= span.end) return;
    const int low = span.begin / 32 * 32, blocks = (span.end - low + 31) / 32;
    prepare();
    TileShapes shapes;
    tiles_for_attention(shapes);
    score(span.zero + low, span.end - low);
    alignas(64) int32_t begins[kTileQueries] = {}, ends[kTileQueries] = {};
    for (int q = 0; q < all; ++q) {
      begins[q] = std::max(span.begin, begin(q % count_) - span.zero) - low;
      ends[q] = std::min(span.end, end(q % count_) - span.zero) - low;
    }
    const Sight sight{_mm512_load_si512(begins), _mm512_load_si512(ends), begins[all - 1], ends[0]};
    Floats most, sum;
    weigh_tokens(score_, blocks * 32, sight, weight_, most, sum);
    alignas(64) float mosts[kLanes], sums[kLanes];
    most.store(mosts), sum.store(sums);
    for (int q = 0; q < all; ++q) {
      const Seen seen{to + q * size};
      seen.most() = mosts[q], seen.sum() = sums[q];
    }
    for (int block = 0; block < blocks; ++block) turn_weights(weight_ + block * 16 * kTileQueries);
    for (int head = 0; head < heads_; ++head)
      for (int i = 0; i < dim_; i += kValueDims)
        if (dim_ - i >= kValueDims)
          mix<kValueDims / 16>(span, low, blocks, head, i, to);
        else
          mix<2>(span, low, blocks, head, i, to);
  }

 private:
  static constexpr int kValueDims = 64;  // dimensions of the values that are mixed together

  // Writes the queries of all heads as columns [heads * dim / 2, 16].
  void prepare() {
    std::fill_n(query_, int64_t(kTileQueries) / 2 * heads_ * dim_, 0.0f);
    for (int head = 0; head < heads_; ++head)
      for (int q = 0; q < count_; ++q) {
        turn_query_to(q, score_, kv_head_ + head);
        turn_query(score_, dim_, columns_ + int64_t(head) * dim_ / 2 * kTileQueries + head * count_ + q);
      }
  }

  // Computes the scores of `count` tokens from position `first` on, where 16 tokens of a page begin. The values are
  // needed right after that, so they are fetched meanwhile.
  void score(int first, int count) {
    const int64_t apart = this->apart() * sizeof(Number);
    int t = 0;
    for (; t + 64 <= count; t += 64) {
      const Number *keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = at(first + t + 16 * i, 0);
        ask_for(at(first + t + 16 * i, 1));
        if (t + 64 + 16 * i < count) ask_for(at(first + t + 64 + 16 * i, 0));
      }
      score_tokens<4>(keys, apart, heads_ * dim_, columns_, score_ + t * kTileQueries);
    }
    for (; t < count; t += 16) {
      const Number *key = at(first + t, 0);
      ask_for(at(first + t, 1));
      score_tokens<1>(&key, apart, heads_ * dim_, columns_, score_ + t * kTileQueries);
    }
  }

  // Fetches the keys or values of 16 tokens to the second cache.
  void ask_for(const Number *at) const {
    for (int token = 0; token < 16; ++token, at += apart())
      for (int i = 0; i < heads_ * dim_; i += 64 / int(sizeof(Number))) __builtin_prefetch(at + i, 0, 2);
  }

  // Turns the weights of 32 tokens, [16 pairs of tokens, 16 queries], to rows of queries.
  static void turn_weights(uint32_t *weight) {
    __m512i rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(weight + r * kTileQueries);
    transpose(rows);
    for (int r = 0; r < 16; ++r) _mm512_store_si512(weight + r * kTileQueries, rows[r]);
  }

  // Mixes `16 * tiles` dimensions of the values of a head from dimension i on, over `blocks` blocks of 32 tokens.
  template <int tiles> void mix(const Span &span, int low, int blocks, int head, int i, float *to) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (tiles > 2) tile_zero<2>(), tile_zero<3>();
    for (int block = 0; block < blocks; ++block) {
      const int t = low + block * 32;
      for (int half = 0; half < 32 && t + half < span.end; half += 16)
        pair_values<tiles>(at(span.zero + t + half, 1) + head * dim_ + i, span.end - t - half, value_ + half / 2 * 16);
      if (t + 16 >= span.end) zero_values<tiles>(value_ + 8 * 16);
      tile_load<7>(weight_ + block * 16 * kTileQueries, 64);
      tile_load<4>(value_, 64), tile_add<0, 7, 4>();
      tile_load<5>(value_ + 256, 64), tile_add<1, 7, 5>();
      if constexpr (tiles > 2) {
        tile_load<6>(value_ + 512, 64), tile_add<2, 7, 6>();
        tile_load<4>(value_ + 768, 64), tile_add<3, 7, 4>();
      }
    }
    alignas(64) float mixed[4 * 256];
    tile_store<0>(mixed, 64), tile_store<1>(mixed + 256, 64);
    if constexpr (tiles > 2) tile_store<2>(mixed + 512, 64), tile_store<3>(mixed + 768, 64);
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                  second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int q = 0; q < count_; ++q) {
      const int row = head * count_ + q;
      float *own = to + row * Seen::size(dim_) + kLanes + i;
      for (int tile = 0; tile < tiles; tile += 2, own += 32) {
        const __m512i even = _mm512_load_si512(mixed + tile * 256 + row * 16),
                      odd = _mm512_load_si512(mixed + tile * 256 + 256 + row * 16);
        _mm512_storeu_si512(own, _mm512_permutex2var_epi64(even, first, odd));
        _mm512_storeu_si512(own + 16, _mm512_permutex2var_epi64(even, second, odd));
      }
    }
  }

  // Writes 8 rows of each tile: pairs of 16 tokens' values. Of each 32 dimensions the first tile has 4 of 8, the second
  // the others. Behind the last of `count` tokens it writes zeros, because the memory there may hold NaN.
  template <int tiles> void pair_values(const Number *value, int count, uint32_t *to) const {
    const int64_t apart = this->apart();
    for (int pair = 0; pair < 8; ++pair, value += 2 * apart, to += 16)
      for (int tile = 0; tile < tiles; tile += 2) {
        const __m512i none = _mm512_setzero_si512();
        const __m512i even = 2 * pair < count ? _mm512_loadu_si512(value + tile * 16) : none;
        const __m512i odd = 2 * pair + 1 < count ? _mm512_loadu_si512(value + apart + tile * 16) : none;
        _mm512_store_si512(to + tile * 256, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + tile * 256 + 256, _mm512_unpackhi_epi16(even, odd));
      }
  }

  // The same without tokens.
  template <int tiles> static void zero_values(uint32_t *to) {
    for (int tile = 0; tile < tiles; ++tile) std::memset(to + tile * 256, 0, 8 * 64);
  }

  const int heads_;
  uint32_t *columns_;  // [heads * dim / 2, 16] pairs of bfloat16
  float *score_;       // [tokens, 16 queries]
  uint32_t *weight_;   // [tokens / 2, 16 queries] pairs of bfloat16, or for each 32 tokens [16 queries, 16 pairs]
  uint32_t *value_;    // [tiles, 16 pairs of tokens, 16 dimensions]
};

}  // namespace penstock
