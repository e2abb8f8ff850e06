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
  static constexpr int kMost = kQueries;  // most queries of one call of `ask`, unless there is memory for fewer

  HeadLanes(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, Room room,
            int most = kMost)
      : Base(model, step, layer, sequence, kv_head, qkv, room, most, most * model.head_dim),
        score_(room.take(most * kStride)),
        scale_(room.take(kPiece)) {}
  static int64_t room(const Model &model, int most = kMost) {
    return Base::own_room(model, most, most * model.head_dim) + most * kStride + kPiece;
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
  void look(int piece, float *to) { look(this, 1, kAhead, piece, to); }

  // The same for neighbouring heads with as many queries each: [heads, queries]. They take turns with some tokens, so
  // that memory is read from front to back, and fetched `ahead` tokens before.
  static void look(HeadLanes *head, int heads, int ahead, int piece, float *to) {
    const Span span = head->span_of(piece);
    const int64_t size = int64_t(head->count_) * Seen::size(head->dim_);
    std::fill_n(to, heads * size, 0.0f);
    if (span.begin >= span.end) return;
    for (int h = 0; h < heads; ++h) head[h].list_keys(span, ahead);
    for (int t = span.begin; t < span.end; t += kTokens)
      for (int h = 0; h < heads; ++h) head[h].score(span, t, ahead);
    for (int h = 0; h < heads; ++h) head[h].weigh_tokens(span, ahead, to + h * size);
    for (int t = 0; t < head->listed_; t += kBlock)
      for (int h = 0; h < heads; ++h) head[h].mix_values(t, ahead, to + h * size);
  }

  // Writes the queries' rows of `mixed` from what they have seen.
  void finish(float *mixed) {
    for (int q = 0; q < count_; ++q) {
      this->mix_of(q, score_);
      Cache::restore(score_, dim_, this->row_of(q, mixed));
    }
  }

 private:
  void list_keys(const Span &span, int ahead) {
    listed_ = span.end - span.begin;
    this->list(span.zero + span.begin, listed_, 0);
    this->template fetch<2>(0, ahead, listed_);
  }

  // Computes the scores of kTokens tokens from t on.
  void score(const Span &span, int t, int ahead) {
    const Number *const *keys = tokens_ + t - span.begin;
    this->template fetch<2>(t - span.begin + ahead, kTokens, listed_);
    over<4>([&]<int queries, int dim>(int q) {
      const float *query = query_ + q * dim_;
      float *score = score_ + q * kStride + t;
      if constexpr (Cache::kPairs)
        score_pairs<queries, dim>(keys, query, dim_, score, kStride);
      else
        scores<Cache, queries, dim>(keys, query, dim_, score, kStride);
    });
  }

  // Turns all scores into weights, and lists the values.
  void weigh_tokens(const Span &span, int ahead, float *to) {
    const auto [zero, begin, end] = span;
    if constexpr (Cache::kScale) scale(begin, end);
    const int64_t values = this->at(zero + begin, 1) - this->at(zero + begin, 0);
    this->template fetch<2>(0, ahead, listed_, values);
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
    for (int t = 0; t < listed_; ++t) tokens_[t] += values;
    if constexpr (Cache::kScale) scale(begin, end);
    weighed_ = begin;
    if constexpr (Cache::kPairs) list_pairs();
  }

  // Pairs begin at even positions. The other one of a pair of which only one is there has no weight.
  void list_pairs() {
    if (weighed_ % 2) {
      std::copy_backward(tokens_, tokens_ + listed_, tokens_ + listed_ + 1);
      --weighed_, ++listed_;
    }
    if (listed_ % 2) tokens_[listed_] = tokens_[listed_ - 1], ++listed_;
  }

  // Adds the values of kBlock listed tokens from number t on.
  void mix_values(int t, int ahead, float *to) {
    const Number *const *values = tokens_ + t;
    const int tokens = std::min(kBlock, listed_ - t);
    this->template fetch<2>(t + ahead, kBlock, listed_);
    over<kMixes>([&]<int queries, int dim>(int q) {
      const float *weight = score_ + q * kStride;
      float *mixed = to + q * Seen::size(dim_) + kLanes;
      if constexpr (Cache::kPairs)
        mix_pairs<queries, dim>(values, tokens / 2, reinterpret_cast<const uint16_t *>(weight) + weighed_ + t,
                                2 * kStride, dim_, Seen::size(dim_), mixed);
      else
        mix<Cache, queries, dim>(values, tokens, weight + weighed_ + t, kStride, dim_, Seen::size(dim_), mixed);
    });
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

  float *score_, *scale_;         // [queries, kStride], [kPiece]
  int listed_ = 0, weighed_ = 0;  // listed tokens, and where the weight of the first is
};

// Neighbouring key heads of a sequence, which look together: so memory is read from front to back, which is quicker
// than to read a small part of every token at a time.
template <class Cache> class HeadsInLanes {
 public:
  static constexpr int kMost = 64;  // most queries of all heads: their scores stay in the second cache

  // From `kv_head` on so many heads with all their queries.
  HeadsInLanes(const Model &model, const Step &step, int layer, int sequence, int kv_head, int heads, const float *qkv,
               Room room)
      : ahead_(std::clamp(kAheadBytes / int(heads * model.head_dim * sizeof(typename Cache::Number)), 8, kAhead)) {
    const int rows = step.first[sequence + 1] - step.first[sequence], most = rows * model.heads / model.kv_heads;
    heads_.reserve(heads);
    for (int number = 0; number < heads; ++number) {
      heads_.emplace_back(model, step, layer, sequence, kv_head + number, qkv, room, most);
      room.take(HeadLanes<Cache>::room(model, most));
      heads_.back().ask(0, most);
    }
  }
  static int64_t room(const Model &model) {  // as much as one query in each takes, for kMost of them
    return kMost * HeadLanes<Cache>::room(model, 1);
  }

  // Writes to `to` what the queries see in a piece: [heads, queries] of Seen::size floats.
  void look(int piece, float *to) { HeadLanes<Cache>::look(heads_.data(), int(heads_.size()), ahead_, piece, to); }

 private:
  static constexpr int kAheadBytes = 16384;

  std::vector<HeadLanes<Cache>> heads_;
  const int ahead_;  // how many tokens ahead are fetched
};

}  // namespace penstock
