// Attention over keys and values of any kind, sixteen floats at a time.
#pragma once
#include "head.h"

namespace penstock {

constexpr int kStride =
    kPiece + 16;            // floats between two queries' scores; not a power of two, which would share a cache set
constexpr int kAhead = 48;  // how many tokens ahead are fetched, to the second cache: the first waits for few
constexpr int kBlock = 8;   // tokens whose values stay in the nearest cache while all queries use them
constexpr float kNever = -1e30f;  // the score of a token that is not seen

// Turns score[begin, end) into weights and fills up to whole vectors with zeros. Positions are relative to the piece.
inline void weigh(float *score, int begin, int end, Seen seen) {
  const int first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
  auto around = [&](float value) {
    std::fill(score + first, score + begin, value);
    std::fill(score + end, score + last, value);
  };
  around(kNever);
  Floats high = Floats::load(score + first);
  for (int t = first + kLanes; t < last; t += kLanes) high.most(Floats::load(score + t));
  const float most = high.highest();
  for (int t = first; t < last; t += kLanes) exponential(Floats::load(score + t) + Floats::all(-most)).store(score + t);
  around(0);
  Floats sum = {};
  for (int t = first; t < last; t += kLanes) sum += Floats::load(score + t);
  seen.most() = most, seen.sum() = sum.total();
}

template <class Cache> class HeadLanes : public Head<HeadLanes<Cache>, Cache> {
  using Base = Head<HeadLanes<Cache>, Cache>;
  using Base::dim_, Base::count_, Base::from_, Base::query_, Base::tokens_, Base::all_;
  using typename Base::Number, typename Base::Span;

 public:
  static constexpr int kMost = kQueries;  // most queries of one call of `ask`

  HeadLanes(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, Room room)
      : Base(model, step, layer, sequence, kv_head, qkv, room, kMost, kMost * model.head_dim),
        score_(room.take(kMost * kStride)),
        scale_(room.take(kPiece)) {}
  static int64_t room(const Model &model) {
    return Base::own_room(model, kMost, kMost * model.head_dim) + kMost * kStride + kPiece;
  }

  // The following calls are for the queries [from, to).
  void ask(int from, int to) {
    from_ = from, count_ = to - from;
    for (int q = 0; q < count_; ++q) {
      this->turn_query_to(q, score_);
      Cache::arrange(score_, dim_, query_ + q * dim_);
    }
  }

  // Writes to `to` what the queries see in a piece, Seen::size floats for each.
  void look(int piece, float *to) {
    const auto [zero, begin, end] = this->span_of(piece);
    for (int q = 0; q < count_; ++q) std::fill_n(to + q * Seen::size(dim_), Seen::size(dim_), 0.0f);
    if (begin >= end) return;
    this->list(zero + begin, end - begin, 0);
    this->template fetch<2>(0, kAhead, end - begin);
    for (int t = begin; t < end; t += kTokens) {
      this->template fetch<2>(t - begin + kAhead, kTokens, end - begin);
      over<4>([&]<int queries, int dim>(int q) {
        const float *query = query_ + q * dim_;
        float *score = score_ + q * kStride + t;
        if constexpr (Cache::kPairs)
          score_pairs<queries, dim>(tokens_ + t - begin, query, dim_, score, kStride);
        else
          scores<Cache, queries, dim>(tokens_ + t - begin, query, dim_, score, kStride);
      });
    }
    if constexpr (Cache::kScale) scale(begin, end);
    const int64_t values = this->at(zero + begin, 1) - this->at(zero + begin, 0);
    this->template fetch<2>(0, kAhead, end - begin, values);
    for (int q = 0; q < count_; ++q) {
      float *score = score_ + q * kStride;
      const int own = std::max(begin, this->begin(q) - zero), until = std::min(end, this->end(q) - zero);
      if (own < until) weigh(score, own, until, Seen{to + q * Seen::size(dim_)});
      const int first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
      std::fill(score + first, score + std::max(begin, std::min(own, end)), 0.0f);
      std::fill(score + std::max(until, begin), score + last, 0.0f);
      if constexpr (Cache::kPairs)
        for (int t = first; t < last; t += kLanes)
          Floats::load(score + t).round(reinterpret_cast<uint16_t *>(score) + t);
    }
    for (int t = begin; t < end; ++t) tokens_[t - begin] += values;
    if constexpr (Cache::kPairs) return mix_in_pairs(begin, end, to);
    if constexpr (Cache::kScale) scale(begin, end);
    for (int t = begin; t < end; t += kBlock) {
      this->template fetch<2>(t - begin + kAhead, kBlock, end - begin);
      over<kMixes>([&]<int queries, int dim>(int q) {
        const int tokens = std::min(kBlock, end - t);
        mix<Cache, queries, dim>(tokens_ + t - begin, tokens, score_ + q * kStride + t, kStride, dim_, Seen::size(dim_),
                                 to + q * Seen::size(dim_) + kLanes);
      });
    }
  }

  // Writes the queries' rows of `mixed` from what they have seen.
  void finish(float *mixed) {
    for (int q = 0; q < count_; ++q) {
      this->mix_of(q, score_);
      Cache::restore(score_, dim_, this->row_of(q, mixed));
    }
  }

 private:
  // Adds the values of the tokens [begin, end), in pairs that begin at even positions. The other one of a pair of which
  // only one is there has no weight.
  void mix_in_pairs(int begin, int end, float *to) {
    const int count = end - begin, missing = begin % 2;
    if (missing) std::copy_backward(tokens_, tokens_ + count, tokens_ + count + 1);
    tokens_[count + missing] = tokens_[count + missing - 1];
    const int all = (count + missing + 1) / 2;
    for (int pair = 0; pair < all; pair += kBlock / 2) {
      this->template fetch<2>(2 * pair + kAhead, kBlock, count + missing);
      over<kMixes>([&]<int queries, int dim>(int q) {
        const auto *weight = reinterpret_cast<const uint16_t *>(score_ + q * kStride) + begin - missing + 2 * pair;
        mix_pairs<queries, dim>(tokens_ + 2 * pair, std::min(kBlock / 2, all - pair), weight, 2 * kStride, dim_,
                                Seen::size(dim_), to + q * Seen::size(dim_) + kLanes);
      });
    }
  }

  // Multiplies scores or weights by the scales of the listed tokens.
  void scale(int begin, int end) {
    for (int t = begin; t < end; ++t)
      std::memcpy(scale_ + t, this->scale_of(const_cast<Number *>(tokens_[t - begin])), sizeof(float));
    for (int q = 0; q < count_; ++q) {
      float *__restrict score = score_ + q * kStride;
      const float *__restrict factor = scale_;
      for (int t = begin; t < end; ++t) score[t] *= factor[t];
    }
  }

  // Calls work<count, dimension>(first) until all queries are done: `count` queries from `first` on, `most` or fewer.
  // `dimension` is the head dimension if the compiler knows it, else 0.
  template <int most, class Work> void over(Work work) const {
    dim_ == 64 ? over<most, 64>(work) : dim_ == 128 ? over<most, 128>(work) : over<most, 0>(work);
  }
  template <int most, int dim, class Work> void over(Work work) const {
    int q = 0;
    if constexpr (most >= 4)
      for (; q + 4 <= count_; q += 4) work.template operator()<4, dim>(q);
    for (; q + 2 <= count_; q += 2) work.template operator()<2, dim>(q);
    if (q < count_) work.template operator()<1, dim>(q);
  }

  float *score_, *scale_;  // [queries, kStride], [kPiece]
};

}  // namespace penstock
