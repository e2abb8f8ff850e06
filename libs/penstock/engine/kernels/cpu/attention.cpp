#include "attention.h"

#include "tiles.h"
#if defined(__AMX_BF16__)
#include "amx_attention.h"
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace penstock {

float norm_factor(const float *x, int size, float eps) {
  Floats squares[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) squares[v].add(Floats::load(x + i + v * kLanes), Floats::load(x + i + v * kLanes));
  for (; i + kLanes <= size; i += kLanes) squares[0].add(Floats::load(x + i), Floats::load(x + i));
  float sum = ((squares[0] + squares[1]) + (squares[2] + squares[3])).total();
  for (; i < size; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / size + eps);
}

void normalise(const float *x, const float *weight, int size, float eps, float *out) {
  const float factor = norm_factor(x, size, eps);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) (Floats::load(x + i) * factor * Floats::load(weight + i)).store(out + i);
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

namespace {

constexpr int kQueries = 32;          // that look at a piece together
constexpr int kTile = 4 * kQueries;   // of a chunk of a run with many rows; in the processor's tiles all look together
constexpr int kStride = kPiece + 16;  // of their scores; not a power of two, so that they don't share a cache set
constexpr int kAhead = 8;             // tokens that are fetched while others are looked at
constexpr int kBlock = 8;             // tokens whose values stay in the nearest cache for all queries
constexpr float kNever = -1e30f;      // a score whose token is not seen

typedef float Eight __attribute__((vector_size(32)));

// A query, or the row's key, as it looks and is looked at: normalised where the model asks for it, and rotated.
void turn(const Model &model, const Layer &layer, int position, int head, const float *x, float *out) {
  const int dim = model.head_dim, half = dim / 2;
  if (layer.qk_norm) normalise(x, layer.qk_norm + head * dim, dim, model.eps, out), x = out;
  const float *cosine = model.cosine + int64_t(position) * dim, *sine = model.sine + int64_t(position) * dim;
  auto at = [](const float *from) {
    Eight eight;
    std::memcpy(&eight, from, sizeof eight);
    return eight;
  };
  for (int i = 0; i < half; i += 8) {
    const Eight a = at(x + i), b = at(x + i + half);
    const Eight first = a * at(cosine + i) + b * at(sine + i),
                second = b * at(cosine + i + half) + a * at(sine + i + half);
    std::memcpy(out + i, &first, sizeof first);
    std::memcpy(out + i + half, &second, sizeof second);
  }
}

// What a query has seen: the highest score, the sum of the weights e^(score - most), and the values' mix by these.
struct Seen {
  float *at;
  float &most() const { return at[0]; }
  float &sum() const { return at[1]; }
  float *mixed() const { return at + kLanes; }
  static int size(int dim) { return kLanes + dim; }
};

// Joins what was seen in the next piece. Not inlined: always the same instructions, so always the same bits.
__attribute__((noinline)) void join(Seen all, Seen piece, int dim) {
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

// Turns score[begin, end) into weights, with zeros around them up to whole vectors. Positions are those of the piece.
void weigh(float *score, int begin, int end, Seen seen) {
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

// The rows of one sequence in the heads that share a key head.
template <class Cache> class Head {
 public:
  using Number = typename Cache::Number;

  Head(const Model &model, const Step &step, int layer, int sequence, int kv_head, const float *qkv, float *room)
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
        tiled_(in_tiles(model)) {
    tokens_ = reinterpret_cast<const Number **>(room), room += kPiece * 2 + kTokens * 2;
    if (tiled_) {
      query_ = room, room += kTile / 2 * dim_;
      score_ = room, room += kPiece * 16;
      weight_ = room, room += kPiece / 2 * 16;
      value_ = room, room += dim_ * kValues / 2;
    } else {
      query_ = room, room += kQueries * dim_;
      score_ = room, room += kQueries * kStride;
      scale_ = room, room += kPiece;
    }
    piece_ = room, room += most() * Seen::size(dim_);
    all_ = room;
  }
  static int64_t room(const Model &model) {
    const int dim = model.head_dim, tokens = 2 * kPiece + 2 * kTokens;
    return in_tiles(model) ? tokens + kTile * (dim / 2 + 2 * Seen::size(dim)) + kPiece * 24 + dim * kValues / 2
                           : tokens + kPiece + kQueries * (dim + kStride + 2 * Seen::size(dim)) + dim;
  }

  // Queries of one call of `ask`.
  int most() const { return tiled_ ? kTile : kQueries; }
  int queries() const { return (last_ - first_) * group_; }

  // Keys and values of the rows whose positions are in [begin, end).
  void keep(int begin, int end) {
    for (int row = first_; row < last_; ++row) {
      const int position = step_.position[row], key_head = model_.heads + kv_head_;
      if (position < begin || position >= end) continue;
      const float *x = qkv_ + int64_t(row) * (model_.heads + 2 * model_.kv_heads) * dim_;
      turn(model_, layer_, position, key_head, x + key_head * dim_, query_);
      put(query_, at(position, 0));
      put(x + (key_head + model_.kv_heads) * dim_, at(position, 1));
    }
  }

  // Queries [from, to) are those of the following calls.
  void ask(int from, int to) {
    from_ = from, count_ = to - from;
    if (tiled_) std::fill_n(query_, kTile / 2 * dim_, 0.0f);
    for (int q = 0; q < count_; ++q) {
      const int row = this->row(q), head = kv_head_ * group_ + (from + q) % group_;
      float *turned = score_;
      turn(model_, layer_, step_.position[row], head,
           qkv_ + (int64_t(row) * (model_.heads + 2 * model_.kv_heads) + head) * dim_, turned);
      for (int i = 0; i < dim_; i += kLanes) (Floats::load(turned + i) * model_.scale).store(turned + i);
#if defined(__AMX_BF16__)
      if (tiled_) {
        turn_query(turned, dim_, columns(q / kTileQueries) + q % kTileQueries);
        continue;
      }
#endif
      Cache::arrange(turned, dim_, query_ + q * dim_);
    }
  }

  // What queries see of a piece: in `to`, Seen::size floats each.
  void look(int piece, float *to) {
    const int zero = piece * kPiece;
    const int begin = std::max(0, this->begin(0) - zero), end = std::min(kPiece, this->end(count_ - 1) - zero);
    for (int q = 0; q < count_; ++q) std::fill_n(to + q * Seen::size(dim_), Seen::size(dim_), 0.0f);
    if (begin >= end) return;
    if (tiled_) return look_in_tiles(zero, begin, end, to);
    list(zero + begin, end - begin, 0);
    for (int t = begin; t < end; t += kTokens) {
      fetch(t - begin + kAhead, kTokens, end - begin);
      over<4>([&]<int queries, int dim>(int q) {
        scores<Cache, queries, dim>(tokens_ + t - begin, query_ + q * dim_, dim_, score_ + q * kStride + t, kStride);
      });
    }
    if constexpr (Cache::kScale) scale(begin, end);
    for (int q = 0; q < count_; ++q) {
      float *score = score_ + q * kStride;
      const int own = std::max(begin, this->begin(q) - zero), until = std::min(end, this->end(q) - zero);
      if (own < until) weigh(score, own, until, Seen{to + q * Seen::size(dim_)});
      std::fill(score + begin, score + std::max(begin, std::min(own, end)), 0.0f);
      std::fill(score + std::max(until, begin), score + end, 0.0f);
    }
    const int64_t values = at(zero + begin, 1) - at(zero + begin, 0);
    for (int t = begin; t < end; ++t) tokens_[t - begin] += values;
    if constexpr (Cache::kScale) scale(begin, end);
    for (int t = begin; t < end; t += kBlock) {
      fetch(t - begin + kAhead, kBlock, end - begin);
      over<kMixes>([&]<int queries, int dim>(int q) {
        const int tokens = std::min(kBlock, end - t);
        mix<Cache, queries, dim>(tokens_ + t - begin, tokens, score_ + q * kStride + t, kStride, dim_, Seen::size(dim_),
                                 to + q * Seen::size(dim_) + kLanes);
      });
    }
  }

  // The queries' rows of `mixed`, from what they have seen.
  void finish(float *mixed) {
    for (int q = 0; q < count_; ++q) {
      const float *seen = all_ + q * Seen::size(dim_);
      float *out = mixed + (int64_t(row(q)) * model_.heads + kv_head_ * group_ + (from_ + q) % group_) * dim_;
      const float whole = 1.0f / seen[1];
      float *scaled = tiled_ ? out : score_;
      for (int i = 0; i < dim_; i += kLanes) (Floats::load(seen + kLanes + i) * whole).store(scaled + i);
      if (!tiled_) Cache::restore(scaled, dim_, out);
    }
  }

  // All pieces, one after the other.
  void look_through() {
    const int first = begin(0) / kPiece, last = (end(count_ - 1) + kPiece - 1) / kPiece;
    if (last == first + 1) return look(first, all_);
    forget();
    for (int piece = first; piece < last; ++piece) {
      look(piece, piece_);
      join(piece_);
    }
  }

  void forget() { std::fill_n(all_, count_ * Seen::size(dim_), 0.0f); }

  void join(float *piece) {
    for (int q = 0; q < count_; ++q)
      penstock::join(Seen{all_ + q * Seen::size(dim_)}, Seen{piece + q * Seen::size(dim_)}, dim_);
  }

 private:
  static constexpr int kValues = kPiece + 32;  // numbers of a dimension's values in a piece; not a power of two either

  // bfloat16 where the processor has tiles, as long as keys and values fill them.
  static bool in_tiles(const Model &model) {
    return kTiles && model.kv_kind == BFLOAT16 && model.head_dim % 32 == 0 && model.block_size % 16 == 0;
  }

#if defined(__AMX_BF16__)
  uint32_t *columns(int block) const {
    return reinterpret_cast<uint32_t *>(query_) + int64_t(block) * dim_ / 2 * kTileQueries;
  }

  void look_in_tiles(int zero, int begin, int end, float *to) {
    if constexpr (std::is_same_v<Cache, Bf16Cache>) {
      TileShapes shapes;
      tiles_for_attention(shapes);
      auto *values = reinterpret_cast<uint16_t *>(value_);
      auto *weights = reinterpret_cast<uint32_t *>(weight_);
      const int64_t apart = this->apart() * sizeof(Number);
      list(zero + begin / 32 * 32, end - begin / 32 * 32, 1);
      for (int t = begin / 32 * 32; t < end; t += 32) {
        fetch(t + 32 - begin / 32 * 32, 32, end - begin / 32 * 32);
        turn_values(tokens_ + t - begin / 32 * 32, std::min(32, end - t), dim_, values + t, kValues);
      }
      for (int from = 0; from < count_; from += kTileQueries) {
        const int some = std::min(count_ - from, kTileQueries);
        alignas(64) int32_t begins[kTileQueries] = {}, ends[kTileQueries] = {};
        const int low = std::max(begin, this->begin(from) - zero) / 32 * 32,
                  high = std::min(end, this->end(from + some - 1) - zero);
        if (low >= high) continue;
        for (int q = 0; q < some; ++q)
          begins[q] = this->begin(from + q) - zero - low, ends[q] = this->end(from + q) - zero - low;
        const Sight sight{_mm512_load_si512(begins), _mm512_load_si512(ends), begins[some - 1], ends[0]};
        const int count = (high - low + 31) / 32 * 32;
        int t = 0;
        for (; t + 64 <= high - low; t += 64) {
          const Number *keys[4];
          for (int i = 0; i < 4; ++i) {
            keys[i] = at(zero + low + t + 16 * i, 0);
            if (from == 0 && t + 64 + 16 * i < high - low) ask_for(at(zero + low + t + 64 + 16 * i, 0));
          }
          score_tokens<4>(keys, apart, dim_, columns(from / kTileQueries), score_ + t * kTileQueries);
        }
        for (; t < high - low; t += 16) {
          const Number *key = at(zero + low + t, 0);
          score_tokens<1>(&key, apart, dim_, columns(from / kTileQueries), score_ + t * kTileQueries);
        }
        Floats most, sum;
        weigh_tokens(score_, count, sight, weights, most, sum);
        alignas(64) float mosts[kLanes], sums[kLanes];
        most.store(mosts), sum.store(sums);
        for (int q = 0; q < some; ++q) {
          float *seen = to + (from + q) * Seen::size(dim_);
          seen[0] = mosts[q], seen[1] = sums[q];
        }
        for (int i = 0; i < dim_;) {
          alignas(64) float mixed[4 * 16 * kLanes];
          const int tiles = i + 64 <= dim_ ? 4 : 2;
          const uint16_t *own = values + int64_t(i) * kValues + low;
          tiles == 4 ? mix_tokens<4>(own, kValues * 2, count / 32, weights, mixed)
                     : mix_tokens<2>(own, kValues * 2, count / 32, weights, mixed);
          for (int tile = 0; tile < tiles; ++tile, i += 16) {
            __m512i rows[16];
            for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(mixed + (tile * 16 + r) * kLanes);
            transpose(rows);
            for (int q = 0; q < some; ++q)
              _mm512_storeu_si512(to + (from + q) * Seen::size(dim_) + kLanes + i, rows[q]);
          }
        }
      }
    }
  }
#else
  void look_in_tiles(int, int, int, float *) {}
#endif

  // Asks for the keys or values of 16 tokens.
  void ask_for(const Number *at) const {
    for (int token = 0; token < 16; ++token, at += apart())
      for (int i = 0; i < dim_; i += 64 / int(sizeof(Number))) __builtin_prefetch(at + i);
  }

  int row(int q) const { return first_ + (from_ + q) / group_; }
  int end(int q) const { return step_.position[row(q)] + 1; }
  int begin(int q) const { return layer_.window ? std::max(0, end(q) - layer_.window) : 0; }

  Number *at(int position, int which) const {
    const int64_t run = (int64_t(table_[position / model_.block_size]) * model_.layers + number_) * 2 + which;
    return static_cast<Number *>(model_.pool) + (run * model_.block_size + position % model_.block_size) * apart() +
           kv_head_ * dim_;
  }
  int64_t apart() const { return int64_t(model_.kv_heads) * (dim_ + Cache::kScale); }  // numbers of a token

  // Where the scale of a vector is.
  Number *scale_of(Number *vector) const {
    return vector + (model_.kv_heads - kv_head_) * dim_ + kv_head_ * Cache::kScale;
  }

  void put(const float *from, Number *to) const {
    if constexpr (Cache::kScale) {
      const float scale = Cache::write(from, dim_, to);
      std::memcpy(scale_of(to), &scale, sizeof scale);
    } else {
      Cache::write(from, dim_, to);
    }
  }

  // Multiplies scores or weights by the scales of the listed tokens.
  void scale(int begin, int end) {
    for (int t = begin; t < end; ++t)
      std::memcpy(scale_ + t, scale_of(const_cast<Number *>(tokens_[t - begin])), sizeof(float));
    for (int q = 0; q < count_; ++q) {
      float *__restrict score = score_ + q * kStride;
      const float *__restrict factor = scale_;
      for (int t = begin; t < end; ++t) score[t] *= factor[t];
    }
  }

  // Where the keys (0) or values (1) of `count` tokens are, with the last one again up to a whole call of `scores`.
  void list(int begin, int count, int which) {
    const int64_t step = apart();
    for (int t = 0; t < count;) {
      const int offset = (begin + t) % model_.block_size, stop = std::min(count, t + model_.block_size - offset);
      const Number *token = at(begin + t, which);
      for (; t < stop; ++t, token += step) tokens_[t] = token;
    }
    for (int t = count; t % kTokens; ++t) tokens_[t] = tokens_[count - 1];
  }

  // Heads lie too far apart for the processor to see where the next token's is.
  void fetch(int from, int count, int all) const {
    for (int t = from; t < std::min(from + count, all); ++t)
      for (int i = 0; i < dim_; i += 64 / int(sizeof(Number))) __builtin_prefetch(tokens_[t] + i);
  }

  // work<queries at a time, head dimension if known>(first query) for all; `most` of them at a time.
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

  const Model &model_;
  const Step &step_;
  const Layer &layer_;
  const int number_, kv_head_;
  const float *qkv_;
  const int32_t *table_;
  const int first_, last_, dim_, group_;
  const bool tiled_;
  int from_ = 0, count_ = 0;
  const Number **tokens_;
  float *query_, *score_, *scale_, *weight_, *value_, *piece_, *all_;
};

}  // namespace

Attention::Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch)
    : model_(model),
      step_(step),
      qkv_(qkv),
      mixed_(mixed) {
  const int members = team_size(team);
  room_size_ = (Head<F32Cache>::room(model) + 15) / 16 * 16;
  room_ = scratch.floats(room_size_ * members);
  for (int sequence = 0, sample = 0; sequence < step.sequences; ++sequence) {
    const int before = sample;
    while (sample < step.samples && step.sampled[sample] < step.first[sequence + 1]) ++sample;
    units_of(sequence, sample > before);
  }
  parts_ = scratch.floats(all_parts_);
  left_ = std::vector<std::atomic<int>>(shares_.size());
  for (size_t i = 0; i < shares_.size(); ++i) left_[i] = shares_[i];
}

// Heads follow each other, as their keys are neighbours.
void Attention::units_of(int sequence, bool needed) {
  const int group = model_.heads / model_.kv_heads, first = step_.first[sequence], last = step_.first[sequence + 1];
  const int queries = (last - first) * group, count = pieces(sequence);
  auto each = [&](std::vector<Unit> &units, Unit unit) {
    for (unit.kv_head = 0; unit.kv_head < model_.kv_heads; ++unit.kv_head) {
      units.push_back(unit);
      if (unit.shared < 0) continue;
      ++unit.shared, unit.parts += count * int64_t(queries) * Seen::size(model_.head_dim);
    }
  };
  if (queries > kTile) {
    each(keeps_, {sequence, 0, 0, count, 0, 0, false, false, -1, 0});
    for (int from = 0; from < queries; from += kTile) {
      const int to = std::min(from + kTile, queries);
      const int32_t *next = std::lower_bound(step_.sampled, step_.sampled + step_.samples, first + from / group);
      const bool some = next < step_.sampled + step_.samples && *next <= first + (to - 1) / group;
      each(units_, {sequence, 0, 0, count, from, to, true, some, -1, 0});
    }
  } else if (queries > kQueries || count == 1) {
    each(units_, {sequence, 0, 0, count, 0, queries, false, needed, -1, 0});
  } else {
    for (int piece = 0; piece < count; ++piece)
      each(units_, {sequence, 0, piece, piece + 1, 0, queries, false, needed, int(shares_.size()), all_parts_});
    all_parts_ += model_.kv_heads * count * int64_t(queries) * Seen::size(model_.head_dim);
    shares_.insert(shares_.end(), model_.kv_heads, count);
  }
}

int Attention::pieces(int sequence) const { return step_.position[step_.first[sequence + 1] - 1] / kPiece + 1; }

void Attention::run(int layer, int chunk, int member, bool sampled) {
  const Unit &unit = units_[chunk];
  run(layer, unit, member, unit.needed || !sampled);
}

void Attention::keep(int layer, int chunk, int member) { run(layer, keeps_[chunk], member, false); }

void Attention::run(int layer, const Unit &unit, int member, bool mixes) {
  float *room = room_ + room_size_ * member;
  switch (model_.kv_kind) {
    case FLOAT32: return run<F32Cache>(layer, unit, room, mixes);
    case BFLOAT16: return run<Bf16Cache>(layer, unit, room, mixes);
    default: return run<Int8Cache>(layer, unit, room, mixes);
  }
}

template <class Cache> void Attention::run(int layer, const Unit &unit, float *room, bool mixes) {
  Head<Cache> head(model_, step_, layer, unit.sequence, unit.kv_head, qkv_, room);
  if (!unit.kept) head.keep(unit.begin * kPiece, unit.end * kPiece);
  if (!mixes) return;
  if (unit.shared < 0) {
    for (int from = unit.from; from < unit.to; from += head.most()) {
      head.ask(from, std::min(from + head.most(), unit.to));
      head.look_through();
      head.finish(mixed_);
    }
    return;
  }
  head.ask(0, head.queries());
  const int64_t size = head.queries() * Seen::size(model_.head_dim);
  for (int piece = unit.begin; piece < unit.end; ++piece) head.look(piece, parts_ + unit.parts + piece * size);
  if (left_[unit.shared].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  left_[unit.shared].store(shares_[unit.shared], std::memory_order_relaxed);  // for the next layer
  head.forget();
  for (int piece = 0; piece < pieces(unit.sequence); ++piece) head.join(parts_ + unit.parts + piece * size);
  head.finish(mixed_);
}

void attend(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed) {
  Scratch scratch;
  Attention attention(team, model, step, qkv, mixed, scratch);
  const int chunks[] = {attention.keeping(), attention.chunks()};
  team_run(
      team, 2, chunks,
      [](void *self, int phase, int chunk, int member) {
        Attention &attention = *static_cast<Attention *>(self);
        phase ? attention.run(0, chunk, member) : attention.keep(0, chunk, member);
      },
      &attention);
}

}  // namespace penstock
