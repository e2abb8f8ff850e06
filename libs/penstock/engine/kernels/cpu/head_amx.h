// Attention over keys and values in bfloat16, computed in the processor's tiles.
#pragma once
#include "amx_attention.h"
#include "head.h"

namespace penstock {

class HeadTiles : public Head<HeadTiles, Bf16Cache> {
 public:
  static constexpr int kMost = kTile;  // most queries of one call of `ask`

  HeadTiles(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, Room room)
      : Head(model, step, layer, sequence, kv_head, qkv, room, kMost, kMost / 2 * model.head_dim),
        score_(room.take(kPiece * kTileQueries)),
        weight_(reinterpret_cast<uint32_t *>(room.take(2 * kWeights))),
        value_(reinterpret_cast<uint16_t *>(room.take(model.head_dim * kValues / 2))) {}
  static int64_t room(const Model &model) {
    return own_room(model, kMost, kMost / 2 * model.head_dim) + kPiece * kTileQueries + 2 * kWeights +
           model.head_dim * kValues / 2;
  }

  // The following calls are for the queries [from, to).
  void ask(int from, int to) {
    from_ = from, count_ = to - from;
    std::fill_n(query_, kMost / 2 * dim_, 0.0f);
    for (int q = 0; q < count_; ++q) {
      turn_query_to(q, score_);
      turn_query(score_, dim_, columns(q / kTileQueries) + q % kTileQueries);
    }
  }

  // Writes to `to` what the queries see in a piece, Seen::size floats for each.
  void look(int piece, float *to) {
    const Span span = span_of(piece);
    for (int q = 0; q < count_; ++q) std::fill_n(to + q * Seen::size(dim_), Seen::size(dim_), 0.0f);
    if (span.begin >= span.end) return;
    TileShapes shapes;
    tiles_for_attention(shapes);
    turn_values_of(span);
    for (int from = 0; from < count_; from += 2 * kTileQueries) look_together(span, from, to);
  }

  // Writes the queries' rows of `mixed` from what they have seen.
  void finish(float *mixed) {
    for (int q = 0; q < count_; ++q) mix_of(q, row_of(q, mixed));
  }

 private:
  static constexpr int kWeights = kPiece / 2 * kTileQueries;  // numbers of the weights of 16 queries
  static constexpr int kValues = kPiece + 32;  // numbers between two dimensions of `value_`; not a power of two

  // The prepared queries of a block, as columns of tiles.
  uint32_t *columns(int block) const {
    return reinterpret_cast<uint32_t *>(query_) + int64_t(block) * dim_ / 2 * kTileQueries;
  }

  // Transposes the values of a span, from the beginning of its first block of 32 tokens on.
  void turn_values_of(const Span &span) {
    const int first = span.begin / 32 * 32, all = span.end - first;
    list(span.zero + first, all, 1);
    for (int t = first; t < span.end; t += 32) {
      fetch<1>(t + 32 - first, 32, all);
      turn_values(tokens_ + t - first, std::min(32, span.end - t), dim_, value_ + t, kValues);
    }
  }

  // Computes what the queries [from, from + 32) see, over the tokens [low, high) that any of them sees.
  void look_together(const Span &span, int from, float *to) {
    const int some = std::min(count_ - from, 2 * kTileQueries);
    const int low = std::max(span.begin, begin(from) - span.zero) / 32 * 32;
    const int high = std::min(span.end, end(from + some - 1) - span.zero);
    if (low >= high) return;
    for (int first = 0; first < some; first += kTileQueries)
      weigh(span, low, high, from + first, std::min(some - first, kTileQueries),
            weight_ + first / kTileQueries * kWeights, to);
    mix(low, (high - low + 31) / 32, some, to + from * Seen::size(dim_));
  }

  // Computes the weights of those tokens for `some` queries, at most 16, and notes the largest score and the sum.
  void weigh(const Span &span, int low, int high, int from, int some, uint32_t *weight, float *to) {
    alignas(64) int32_t begins[kTileQueries] = {}, ends[kTileQueries] = {};
    for (int q = 0; q < some; ++q)
      begins[q] = begin(from + q) - span.zero - low, ends[q] = end(from + q) - span.zero - low;
    const Sight sight{_mm512_load_si512(begins), _mm512_load_si512(ends), begins[some - 1], ends[0]};
    score(span.zero + low, high - low, from);
    Floats most, sum;
    weigh_tokens(score_, (high - low + 31) / 32 * 32, sight, weight, most, sum);
    alignas(64) float mosts[kLanes], sums[kLanes];
    most.store(mosts), sum.store(sums);
    for (int q = 0; q < some; ++q) {
      const Seen seen{to + (from + q) * Seen::size(dim_)};
      seen.most() = mosts[q], seen.sum() = sums[q];
    }
  }

  // Computes the scores of `count` tokens from position `first` on, where 16 tokens of a page begin.
  void score(int first, int count, int from) {
    const int64_t apart = this->apart() * sizeof(Number);
    const uint32_t *queries = columns(from / kTileQueries);
    int t = 0;
    for (; t + 64 <= count; t += 64) {
      const Number *keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = at(first + t + 16 * i, 0);
        if (from == 0 && t + 64 + 16 * i < count) ask_for(at(first + t + 64 + 16 * i, 0));
      }
      score_tokens<4>(keys, apart, dim_, queries, score_ + t * kTileQueries);
    }
    for (; t < count; t += 16) {
      const Number *key = at(first + t, 0);
      score_tokens<1>(&key, apart, dim_, queries, score_ + t * kTileQueries);
    }
  }

  // Mixes the values for `some` queries, at most 32, over `blocks` blocks of 32 tokens from token `low` on.
  void mix(int low, int blocks, int some, float *to) {
    const int size = Seen::size(dim_);
    alignas(64) float mixed[4 * 16 * kLanes];
    auto write = [&](int tile, int from, int i) {  // one tile, for the queries from `from` on and 16 dimensions
      __m512i rows[16];
      for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(mixed + (tile * 16 + r) * kLanes);
      transpose(rows);
      for (int q = from; q < std::min(some, from + kTileQueries); ++q)
        _mm512_storeu_si512(to + q * size + kLanes + i, rows[q - from]);
    };
    const bool twice = some > kTileQueries;
    for (int i = 0; i < dim_;) {
      const int tiles = !twice && i + 64 <= dim_ ? 4 : 2;
      const uint16_t *own = value_ + int64_t(i) * kValues + low;
      if (twice)
        mix_twice(own, kValues * 2, blocks, weight_, kWeights, mixed);
      else if (tiles == 4)
        mix_tokens<4>(own, kValues * 2, blocks, weight_, mixed);
      else
        mix_tokens<2>(own, kValues * 2, blocks, weight_, mixed);
      for (int tile = 0; tile < tiles; ++tile, i += 16) {
        write(tile, 0, i);
        if (twice) write(2 + tile, kTileQueries, i);
      }
    }
  }

  // Prefetches the keys of 16 tokens.
  void ask_for(const Number *at) const {
    for (int token = 0; token < 16; ++token, at += apart())
      for (int i = 0; i < dim_; i += 64 / int(sizeof(Number))) __builtin_prefetch(at + i);
  }

  float *score_;      // [tokens, 16 queries]
  uint32_t *weight_;  // [2, tokens / 2, 16 queries] pairs of bfloat16
  uint16_t *value_;   // [dim, kValues]
};

}  // namespace penstock
