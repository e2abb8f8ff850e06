// Attention of many queries that look at the same keys: each lane is a query. All numbers are those of head_lanes.h,
// bit for bit: products are added in the order of its lanes, sums joined as `Floats::total` joins lanes.
#pragma once
#include "head_lanes.h"

namespace penstock {

constexpr bool kColumns = kWidth >= 16;  // the registers hold the sums of this many queries
constexpr int kKeys = 4;                 // keys that are multiplied together
constexpr int kMixedTogether = 16;       // dimensions of the values that are mixed together

typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4)));
typedef float FloatLanes __attribute__((vector_size(kLanes * 4)));

// How a lane multiplies: numbers as floats, or pairs of bfloat16, which lie in words of the same size. `kOf` numbers
// are in a word.
template <bool pairs> struct Words {
  static constexpr int kOf = pairs ? 2 : 1;
  // sum += own * word, for a word of each lane and one for all
  static inline void add(FloatLanes &sum, const FloatLanes &own, float word) {
    if constexpr (pairs) {
      Floats all;
      Pairs mine;
      std::memcpy(&all, &sum, sizeof all), std::memcpy(&mine, &own, sizeof mine);
      add_pairs(all, mine, word);
      std::memcpy(&sum, &all, sizeof all);
    } else {
      sum += own * word;
    }
  }
};

// Adds to one[j] the products query[lane + 16 c] * key[j][lane + 16 c] for c = 0, 1..., and to two[j] those of lane
// + 8. A key and a query have `width` words; `fixed` is their number if the compiler knows it, else 0.
template <class Word, int keys, int fixed>
inline __attribute__((always_inline)) void add_lanes(const float *key, const float *query, int any, int lane,
                                                     FloatLanes *one, FloatLanes *two) {
  const int width = fixed ? fixed : any;
  for (int j = 0; j < keys; ++j) one[j] = two[j] = FloatLanes{};
#pragma GCC unroll 8
  for (int i = lane; i < width; i += kLanes) {
    FloatLanes first, second;
    std::memcpy(&first, query + i * kLanes, sizeof first);
    std::memcpy(&second, query + (i + 8) * kLanes, sizeof second);
    for (int j = 0; j < keys; ++j) {
      Word::add(one[j], first, key[j * width + i]);
      Word::add(two[j], second, key[j * width + i + 8]);
    }
  }
}

// The sum over every `step`-th lane from `lane` on, in the order of `Floats::total`.
template <class Word, int keys, int fixed, int step>
inline __attribute__((always_inline)) void sum_lanes(const float *key, const float *query, int width, int lane,
                                                     FloatLanes *sum) {
  FloatLanes other[keys];
  if constexpr (step == 8) {
    add_lanes<Word, keys, fixed>(key, query, width, lane, sum, other);
  } else {
    sum_lanes<Word, keys, fixed, step * 2>(key, query, width, lane, sum);
    sum_lanes<Word, keys, fixed, step * 2>(key, query, width, lane + step, other);
  }
  for (int j = 0; j < keys; ++j) sum[j] += other[j];
}

// Computes score[t] for `count` keys, one after the other in memory, and the 16 queries of `query` [width, 16].
template <class Word, int fixed>
inline void score_columns(const float *key, int count, const float *query, int any, float *score) {
  const int width = fixed ? fixed : any;
  auto some = [&](auto keys, int t) {
    FloatLanes sum[keys];
    sum_lanes<Word, keys, fixed, 1>(key + int64_t(t) * width, query, width, 0, sum);
    std::memcpy(score + t * kLanes, sum, sizeof sum);
  };
  int t = 0;
  for (; t + kKeys <= count; t += kKeys) some(std::integral_constant<int, kKeys>(), t);
  for (; t < count; ++t) some(std::integral_constant<int, 1>(), t);
}

// Computes the mix of `count` rows of values, one after the other in memory, in dimensions [i, i + 16), for 16 queries.
template <class Word>
inline void mix_columns(const float *value, int count, int dim, int i, const float *weight, FloatLanes *mixed) {
  for (int d = 0; d < kMixedTogether; ++d) mixed[d] = FloatLanes{};
  for (int t = 0; t < count; ++t) {
    FloatLanes own;
    std::memcpy(&own, weight + t * kLanes, sizeof own);
    for (int d = 0; d < kMixedTogether; ++d) Word::add(mixed[d], own, value[int64_t(t) * dim + i + d]);
  }
}

template <class Cache> class HeadColumns : public Head<HeadColumns<Cache>, Cache> {
  using Base = Head<HeadColumns<Cache>, Cache>;
  using Base::dim_, Base::count_, Base::from_, Base::query_, Base::tokens_, Base::all_;
  using typename Base::Number, typename Base::Span;
  using Word = Words<Cache::kPairs>;

 public:
  static constexpr int kMost = kTile;  // most queries of one call of `ask`

  HeadColumns(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, Room room)
      : Base(model, step, layer, sequence, kv_head, qkv, room, kMost, kMost * model.head_dim),
        score_(room.take(kPiece * kLanes)),
        own_(room.take(2 * model.head_dim)),
        scale_(room.take(2 * kPiece)),
        keys_(room.take(kPiece * model.head_dim)),
        values_(room.take(kPiece * model.head_dim)) {}
  static int64_t room(const Model &model) {
    return Base::own_room(model, kMost, kMost * model.head_dim) + kPiece * (kLanes + 2 + 2 * model.head_dim) +
           2 * model.head_dim;
  }

  // The following calls are for the queries [from, to).
  void ask(int from, int to) {
    from_ = from, count_ = to - from;
    std::fill_n(query_, kMost * dim_, 0.0f);
    for (int q = 0; q < count_; ++q) {
      this->turn_query_to(q, own_);
      Cache::arrange(own_, dim_, own_ + dim_);
      float *column = query_ + q / kLanes * width() * kLanes + q % kLanes;
      for (int i = 0; i < width(); ++i) std::memcpy(column + i * kLanes, own_ + dim_ + i, sizeof(float));
    }
  }

  // Writes to `to` what the queries see in a piece, Seen::size floats for each.
  void look(int piece, float *to) {
    const Span span = this->span_of(piece);
    std::fill_n(to, int64_t(count_) * Seen::size(dim_), 0.0f);
    if (span.begin >= span.end) return;
    if constexpr (Cache::kPairs) {
      pair(span);
    } else {
      widen(span, 0, keys_);
      widen(span, 1, values_);
    }
    for (int from = 0; from < count_; from += kLanes) look_together(span, from, to);
  }

  // Writes the queries' rows of `mixed` from what they have seen.
  void finish(float *mixed) {
    for (int q = 0; q < count_; ++q) {
      this->mix_of(q, own_);
      Cache::restore(own_, dim_, this->row_of(q, mixed));
    }
  }

 private:
  // Words of a key or a query.
  int width() const { return dim_ / Word::kOf; }

  // Brings the keys of a span together, and its values in pairs of tokens that begin at even positions. The other one
  // of a pair of which only one is there has no weight.
  void pair(const Span &span) {
    const int count = span.end - span.begin;
    this->list(span.zero + span.begin, count, 0);
    this->template fetch<2>(0, kAhead, count);
    for (int t = 0; t < count; ++t) {
      this->template fetch<2>(t + kAhead, 1, count);
      std::memcpy(keys_ + int64_t(span.begin + t) * width(), tokens_[t], dim_ * sizeof(Number));
    }
    this->list(span.zero + span.begin, count, 1);
    this->template fetch<2>(0, kAhead, count);
    for (int t = span.begin / 2 * 2; t < span.end; t += 2) {
      const int even = std::max(t - span.begin, 0), odd = std::min(t + 1, span.end - 1) - span.begin;
      this->template fetch<2>(odd + kAhead, 2, count);
      float *to = values_ + int64_t(t / 2) * dim_;
      for (int i = 0; i < dim_; i += 2 * kLanes) {
        Pairs one, two;
        interleave(tokens_[even] + i, tokens_[odd] + i, one, two);
        one.store(to + i), two.store(to + i + kLanes);
      }
    }
  }

  // Reads the keys (0) or values (1) of a span as floats.
  void widen(const Span &span, int which, float *out) {
    const int count = span.end - span.begin;
    this->list(span.zero + span.begin, count, which);
    this->template fetch<2>(0, kAhead, count);
    for (int t = 0; t < count; ++t) {
      this->template fetch<2>(t + kAhead, 1, count);
      float *own = out + int64_t(span.begin + t) * dim_;
      int i = 0;
      for (; i + 2 * kLanes <= dim_; i += 2 * kLanes) {
        Floats one, two;
        Cache::read(tokens_[t] + i, one, two);
        one.store(own + i), two.store(own + i + kLanes);
      }
      if (i < dim_) Floats::load(tokens_[t] + i).store(own + i);
      if constexpr (Cache::kScale)
        std::memcpy(scale_ + which * kPiece + span.begin + t, this->scale_of(const_cast<Number *>(tokens_[t])),
                    sizeof(float));
    }
  }

  // Computes what the queries [from, from + 16) see, over the tokens [low, high) that any of them sees.
  void look_together(const Span &span, int from, float *to) {
    const int some = std::min(count_ - from, kLanes);
    const int low = std::max(span.begin, this->begin(from) - span.zero);
    const int high = std::min(span.end, this->end(from + some - 1) - span.zero);
    if (low >= high) return;
    const float *key = keys_ + int64_t(low) * width(), *query = query_ + int64_t(from) * width();
    width() == 32    ? score_columns<Word, 32>(key, high - low, query, 0, score_)
    : width() == 64  ? score_columns<Word, 64>(key, high - low, query, 0, score_)
    : width() == 128 ? score_columns<Word, 128>(key, high - low, query, 0, score_)
                     : score_columns<Word, 0>(key, high - low, query, width(), score_);
    if constexpr (Cache::kScale) scale(scale_ + low, high - low);
    IntLanes begins = {}, ends = {};
    for (int q = 0; q < some; ++q)
      begins[q] = this->begin(from + q) - span.zero - low, ends[q] = this->end(from + q) - span.zero - low;
    const auto [most, sum] = weigh(low, high, begins, ends);
    if constexpr (Cache::kScale) scale(scale_ + kPiece + low, high - low);
    for (int q = 0; q < some; ++q) {
      if (sum[q] == 0) continue;
      Seen seen{to + (from + q) * Seen::size(dim_)};
      seen.most() = most[q], seen.sum() = sum[q];
    }
    int rows = high - low;
    if constexpr (Cache::kPairs) rows = pair_weights(low, high);
    for (int i = 0; i < dim_; i += kMixedTogether) {
      FloatLanes mixed[kMixedTogether];
      mix_columns<Word>(values_ + int64_t(low / Word::kOf) * dim_, rows, dim_, i, score_, mixed);
      for (int q = 0; q < some; ++q)
        for (int d = 0; d < kMixedTogether; ++d) to[(from + q) * Seen::size(dim_) + kLanes + i + d] = mixed[d][q];
    }
  }

  FloatLanes at(int t) const {
    FloatLanes score;
    std::memcpy(&score, score_ + t * kLanes, sizeof score);
    return score;
  }

  // Turns the scores of tokens [low, high) into weights; those that a query does not see into zero. Returns for each
  // query the highest score and the sum of the weights.
  std::pair<FloatLanes, FloatLanes> weigh(int low, int high, const IntLanes &begins, const IntLanes &ends) {
    const int count = high - low;
    FloatLanes most = FloatLanes{} + kNever, sum[kLanes] = {};
    for (int t = 0; t < count; ++t) {
      const FloatLanes score = (begins <= t) & (ends > t) ? at(t) : FloatLanes{} + kNever;
      most = most < score ? score : most;
    }
    for (int t = 0; t < count; ++t) {
      Floats given;
      const FloatLanes less = at(t) + -most;
      std::memcpy(&given, &less, sizeof given);
      const Floats found = exponential(given);
      FloatLanes weight;
      std::memcpy(&weight, &found, sizeof weight);
      weight = (begins <= t) & (ends > t) ? weight : FloatLanes{};
      std::memcpy(score_ + t * kLanes, &weight, sizeof weight);
      sum[(low + t) % kLanes] += weight;
    }
    for (int half = kLanes / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    return {most, sum[0]};
  }

  // Rounds the weights of the tokens [low, high) and brings them together in pairs; returns the number of pairs.
  int pair_weights(int low, int high) {
    const int pairs = (high + 1) / 2 - low / 2;
    for (int pair = 0, t = low / 2 * 2 - low; pair < pairs; ++pair, t += 2) {
      const Floats even = t < 0 ? Floats{} : Floats::load(score_ + t * kLanes);
      const Floats odd = t + 1 < high - low ? Floats::load(score_ + (t + 1) * kLanes) : Floats{};
      rounded(even, odd).store(score_ + pair * kLanes);
    }
    return pairs;
  }

  // Multiplies the scores or weights of each token by its scale.
  void scale(const float *factor, int count) {
    for (int t = 0; t < count; ++t) {
      const FloatLanes scaled = at(t) * factor[t];
      std::memcpy(score_ + t * kLanes, &scaled, sizeof scaled);
    }
  }

  float *score_, *own_, *scale_;  // [kPiece, 16], [2, dim], [2, kPiece]
  float *keys_, *values_;         // [kPiece, dim]
};

}  // namespace penstock
