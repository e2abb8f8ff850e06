// The rows of one sequence in the heads that share a key head: where their keys and values are stored, and the results
// of their queries so far. How queries look at a piece of the context is in head_lanes.h and head_amx.h.
#pragma once
#include "attention.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>

namespace penstock {

constexpr int kQueries = 32;         // queries that look at a piece together in lanes
constexpr int kTile = 4 * kQueries;  // queries in a chunk of a long run; in tiles they all look together

// Prepares a query or a key for the scores: normalises and rotates it, as far as the model asks for that.
inline void turn(const Model &model, const Layer &layer, int place, int head, const float *x, float *out) {
  const int dim = model.head_dim;
  if (layer.qk_norm) normalise(x, layer.qk_norm + head * dim, dim, model.eps, out), x = out;
  if (layer.unturned) {
    std::memmove(out, x, dim * sizeof(float));
    return;
  }
  rotate(x, dim, model.cosine + int64_t(place) * dim, model.sine + int64_t(place) * dim, model.interleaved, out);
  if (!model.key_norm) return;
  const float factor = norm_factor(out, dim, model.eps);
  for (int i = 0; i < dim; i += kLanes) (Floats::load(out + i) * factor).store(out + i);
}

// The factor of queries at a position of a layer.
inline float warmth(const Model &model, const Layer &layer, int position) {
  const int times = layer.unturned && model.warm_tokens ? (position + 1) / model.warm_tokens : 0;
  return times ? std::log1p(float(times)) * model.warm_strength + 1 : 1.0f;
}

// What a query has seen: its highest score `most`, the sum of the weights e^(score - most), and the sum of the values
// with these weights.
struct Seen {
  float *at;
  float &most() const { return at[0]; }
  float &sum() const { return at[1]; }
  float *mixed() const { return at + kLanes; }
  static int size(int dim) { return kLanes + dim; }
};

// Adds to `all` what was seen in the next piece. It is not inlined, so that every caller runs the same instructions and
// gets the same bits.
inline __attribute__((noinline)) void join_seen(Seen all, Seen piece, int dim) {
  if (piece.sum() == 0) return;
  if (all.sum() == 0) {
    std::memcpy(all.at, piece.at, Seen::size(dim) * sizeof(float));
    return;
  }
  const float most = std::max(all.most(), piece.most());
  const float kept = exponential(Floats::all(all.most() - most)).part[0][0];
  const float added = exponential(Floats::all(piece.most() - most)).part[0][0];
  all.most() = most;
  all.sum() = all.sum() * kept + piece.sum() * added;
  for (int i = 0; i < dim; i += kLanes) {
    Floats mixed = Floats::load(all.mixed() + i) * kept;
    mixed.add(Floats::load(piece.mixed() + i), added);
    mixed.store(all.mixed() + i);
  }
}

// A thread's memory, handed out from front to back.
struct Room {
  float *next;
  float *take(int64_t count) { return next += count, next - count; }
};

// `Own` is the derived class: it defines `look`, and keeps rotated keys and queries in `query_`.
template <class Own, class Cache> class Head {
 public:
  using Number = typename Cache::Number;

  int queries() const { return (last_ - first_) * group_; }

  // From now on the queries are those of these rows, by position. They may be of several sequences, whose pages are
  // those of this one as far as they look.
  void gather(const int32_t *rows) { rows_ = rows; }

  // The following calls are for the queries [from, to). Whoever looks has to `ask` instead.
  void choose(int from, int to) { from_ = from, count_ = to - from; }

  // Stores the keys and values of the rows whose positions are in [begin, end).
  void keep(int begin, int end) {
    if (model_.rank) return;  // they are vectors that are stored before
    for (int row = first_; row < last_; ++row) {
      const int position = step_.position[row], key_head = model_.heads + kv_head_;
      if (position < begin || position >= end) continue;
      const float *x = qkv_ + row * asked_width(model_);
      turn(model_, layer_, step_.turned[row], key_head, x + key_head * dim_, query_);
      put(query_, at(position, 0));
      put(x + (key_head + model_.kv_heads) * dim_, at(position, 1));
    }
  }

  void keep_vector(int row, const float *vector) { put(vector, at(step_.position[row], 0)); }

  // Looks at all pieces, one after the other.
  void look_through() {
    auto *own = static_cast<Own *>(this);
    const int first = begin(0) / kPiece, last = (end(count_ - 1) + kPiece - 1) / kPiece;
    if (last == first + 1) return own->look(first, all_);
    forget();
    for (int piece = first; piece < last; ++piece) {
      own->look(piece, piece_);
      join(piece_);
    }
  }

  void forget() { std::fill_n(all_, count_ * Seen::size(dim_), 0.0f); }

  // Adds what the queries saw of the next piece.
  void join(float *piece) {
    for (int q = 0; q < count_; ++q)
      join_seen(Seen{all_ + q * Seen::size(dim_)}, Seen{piece + q * Seen::size(dim_)}, dim_);
  }

 protected:
  // `most` is how many queries look together; their prepared form takes `queries` floats.
  Head(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, Room &room,
       int most, int64_t queries)
      : model_(model),
        step_(step),
        layer_(model.layer[layer]),
        number_(layer),
        kv_head_(kv_head),
        qkv_(qkv),
        table_(step.table + step.table_at[sequence]),
        first_(step.first[sequence]),
        last_(step.first[sequence + 1]),
        dim_(model.head_dim),
        group_(model.heads / model.kv_heads),
        tokens_(reinterpret_cast<const Number **>(room.take(kListed))),
        query_(room.take(queries)),
        piece_(room.take(most * Seen::size(model.head_dim))),
        all_(room.take(most * Seen::size(model.head_dim))) {}

  // How many floats of the room this class takes for itself.
  static int64_t own_room(const Model &model, int most, int64_t queries) {
    return kListed + queries + 2 * int64_t(most) * Seen::size(model.head_dim);
  }

  int row(int q) const {
    const int number = (from_ + q) / group_;
    return rows_ ? rows_[number] : first_ + number;
  }
  int end(int q) const { return step_.position[row(q)] + 1; }
  int begin(int q) const {
    if (!layer_.window) return 0;
    const int end = this->end(q);
    return model_.chunked ? (end - 1) / layer_.window * layer_.window : std::max(0, end - layer_.window);
  }

  // Prepares query q of this key head, or of another, and scales it.
  void turn_query_to(int q, float *out) const { turn_query_to(q, out, kv_head_); }
  void turn_query_to(int q, float *out, int kv_head) const {
    const int row = this->row(q), head = kv_head * group_ + (from_ + q) % group_;
    const float *x = qkv_ + row * asked_width(model_) + head * dim_;
    turn(model_, layer_, step_.turned[row], head, x, out);
    const float scale = model_.scale * warmth(model_, layer_, step_.position[row]);
    for (int i = 0; i < dim_; i += kLanes) (Floats::load(out + i) * scale).store(out + i);
  }

  // The part of a piece that any of the queries sees: positions relative to `zero`, where the piece begins.
  struct Span {
    int zero, begin, end;
  };
  Span span_of(int piece) const {
    const int zero = piece * kPiece;
    return {zero, std::max(0, begin(0) - zero), std::min(kPiece, end(count_ - 1) - zero)};
  }

  // Writes the result of query q to `out`: the mean of the values it has seen, by their weights.
  void mix_of(int q, float *out) const {
    const float *seen = all_ + q * Seen::size(dim_);
    const float whole = 1.0f / seen[1];
    for (int i = 0; i < dim_; i += kLanes) (Floats::load(seen + kLanes + i) * whole).store(out + i);
  }
  float *row_of(int q, float *mixed) const {
    return mixed + (int64_t(row(q)) * model_.heads + kv_head_ * group_ + (from_ + q) % group_) * dim_;
  }

  // The address of a token's key (0) or value (1), or of the vector that is both.
  Number *at(int position, int which) const {
    const int64_t layer =
        int64_t(table_[position / model_.block_size]) * model_.page_layers + model_.first_layer + number_;
    const int64_t run = model_.rank ? layer : layer * 2 + which;
    return static_cast<Number *>(model_.memory) + (run * model_.block_size + position % model_.block_size) * apart() +
           kept_head() * dim_;
  }
  int kept_head() const { return model_.rank ? 0 : model_.first_head + kv_head_; }
  int64_t apart() const {
    return int64_t(model_.row_heads) * (dim_ + Cache::kScale);
  }  // numbers from one token to the next

  // The address of a vector's scale.
  Number *scale_of(Number *vector) const {
    const int head = kept_head();
    return vector + (model_.row_heads - head) * dim_ + head * Cache::kScale;
  }

  void put(const float *from, Number *to) const {
    if constexpr (Cache::kScale) {
      const float scale = Cache::write(from, dim_, to);
      std::memcpy(scale_of(to), &scale, sizeof scale);
    } else {
      Cache::write(from, dim_, to);
    }
  }

  // Lists the addresses of the keys (0) or values (1) of `count` tokens. The last one is repeated until the list fills
  // whole calls of `scores`.
  void list(int begin, int count, int which) {
    const int64_t step = apart();
    for (int t = 0; t < count;) {
      const int offset = (begin + t) % model_.block_size, stop = std::min(count, t + model_.block_size - offset);
      const Number *token = at(begin + t, which);
      for (; t < stop; ++t, token += step) tokens_[t] = token;
    }
    for (int t = count; t % kTokens; ++t) tokens_[t] = tokens_[count - 1];
  }

  // Prefetches listed tokens to the cache of that level. The processor can't guess their addresses: those of one head
  // lie too far apart.
  template <int level> void fetch(int from, int count, int all, int64_t apart = 0) const {
    for (int t = from; t < std::min(from + count, all); ++t)
      for (int i = 0; i < dim_; i += 64 / int(sizeof(Number))) __builtin_prefetch(tokens_[t] + apart + i, 0, 4 - level);
  }

  static constexpr int kListed = 2 * (kPiece + kTokens);  // size of the list in floats

  const Model &model_;
  const Step &step_;
  const Layer &layer_;
  const int number_, kv_head_;
  const float *qkv_;
  const int32_t *table_;
  const int first_, last_, dim_, group_;
  const int32_t *rows_ = nullptr;
  int from_ = 0, count_ = 0;  // the queries that look now
  const Number **tokens_;
  float *query_, *piece_, *all_;
};

}  // namespace penstock
