#include "attention.h"

#include "lanes.h"

#include <cmath>

namespace penstock {

float norm_factor(const float *x, int size, float eps) {
  Floats squares = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) squares.add(Floats::load(x + i), Floats::load(x + i));
  float sum = squares.total();
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

inline uint16_t to_bf16(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct F32Cache {
  using Number = float;
  static void put(float *at, float value) { *at = value; }
};
struct Bf16Cache {
  using Number = uint16_t;
  static void put(uint16_t *at, float value) { *at = to_bf16(value); }
};

// A sequence's view of one layer's pages.
template <class Cache> struct Pages {
  using Number = typename Cache::Number;
  const Model &model;
  int layer;
  const int32_t *table;
  Number *token(int position, int which, int head) const {
    const int64_t run = (int64_t(table[position / model.block_size]) * model.layers + layer) * 2 + which;
    return static_cast<Number *>(model.pool) +
           ((run * model.block_size + position % model.block_size) * model.kv_heads + head) * model.head_dim;
  }
};

void turn(const Model &model, const Layer &layer, int position, int head, float *x) {
  const int dim = model.head_dim, half = dim / 2;
  if (layer.qk_norm) normalise(x, layer.qk_norm + head * dim, dim, model.eps, x);
  const float *cosine = model.cosine + int64_t(position) * dim, *sine = model.sine + int64_t(position) * dim;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] + b * sine[i];
    x[i + half] = b * cosine[i + half] + a * sine[i + half];
  }
}

// The queries of one row that share key head `kv_head`.
template <class Cache> void mix(const Attention &work, const Pages<Cache> &pages, int row, int kv_head, float *scores) {
  const Model &model = work.model;
  const int dim = model.head_dim, group = model.heads / model.kv_heads, size = model.block_size;
  const int tokens = work.step.position[row] + 1;
  const int window = model.layer[work.layer].window, begin = window && tokens > window ? tokens - window : 0;
  const float *query = work.qkv + (int64_t(row) * (model.heads + 2 * model.kv_heads) + kv_head * group) * dim;
  const int64_t stride = int64_t(model.kv_heads) * dim;
  for (int token = begin; token < tokens;) {
    const int at = token % size, count = tokens - token < size - at ? tokens - token : size - at;
    const auto *key = pages.token(token, 0, kv_head);
    for (int t = 0; t < count; ++t, key += stride)
      for (int q = 0; q < group; ++q) {
        Floats sum = {};
        for (int i = 0; i < dim; i += kLanes) sum.add(Floats::load(query + q * dim + i), Floats::load(key + i));
        scores[int64_t(q) * work.longest + token - begin + t] = sum.total() * model.scale;
      }
    token += count;
  }
  const int seen = tokens - begin;
  for (int q = 0; q < group; ++q) {
    float *score = scores + int64_t(q) * work.longest;
    float most = score[0];
    for (int t = 1; t < seen; ++t) most = score[t] > most ? score[t] : most;
    for (int t = seen; t % kLanes; ++t) score[t] = most - 1000;  // e to that is nothing
    Floats sum = {};
    for (int t = 0; t < seen; t += kLanes) {
      const Floats e = exponential(Floats::load(score + t) + Floats::all(-most));
      e.store(score + t);
      sum += e;
    }
    const float whole = 1.0f / sum.total();
    float *out = work.mixed + (int64_t(row) * model.heads + kv_head * group + q) * dim;
    for (int i = 0; i < dim; i += 4 * kLanes) {
      Floats mixed[4] = {};
      const int vectors = (dim - i) / kLanes < 4 ? (dim - i) / kLanes : 4;
      for (int token = begin; token < tokens;) {
        const int at = token % size, count = tokens - token < size - at ? tokens - token : size - at;
        const auto *value = pages.token(token, 1, kv_head) + i;
        for (int t = 0; t < count; ++t, value += stride)
          for (int v = 0; v < vectors; ++v) mixed[v].add(Floats::load(value + v * kLanes), score[token - begin + t]);
        token += count;
      }
      for (int v = 0; v < vectors; ++v) (mixed[v] * whole).store(out + i + v * kLanes);
    }
  }
}

template <class Cache> void attend(const Attention &work, int sequence, int kv_head, float *room) {
  const Model &model = work.model;
  const Layer &layer = model.layer[work.layer];
  const int dim = model.head_dim, group = model.heads / model.kv_heads;
  const Pages<Cache> pages{model, work.layer, work.step.table + work.step.table_at[sequence]};
  const int from = work.step.first[sequence], to = work.step.first[sequence + 1];
  for (int row = from; row < to; ++row) {
    float *x = work.qkv + int64_t(row) * (model.heads + 2 * model.kv_heads) * dim;
    const int position = work.step.position[row], key_head = model.heads + kv_head;
    for (int q = kv_head * group; q < (kv_head + 1) * group; ++q) turn(model, layer, position, q, x + q * dim);
    turn(model, layer, position, key_head, x + key_head * dim);
    for (int which = 0; which < 2; ++which) {
      const float *own = x + (key_head + which * model.kv_heads) * dim;
      auto *to = pages.token(position, which, kv_head);
      for (int i = 0; i < dim; ++i) Cache::put(to + i, own[i]);
    }
  }
  for (int row = from; row < to; ++row) mix(work, pages, row, kv_head, room);
}

}  // namespace

int64_t attention_room(const Model &model, int longest) {
  return int64_t(model.heads / model.kv_heads) * longest;
}

void attend(const Attention &work, int sequence, int kv_head, float *room) {
  work.model.kv_kind == BF16 ? attend<Bf16Cache>(work, sequence, kv_head, room)
                             : attend<F32Cache>(work, sequence, kv_head, room);
}

}  // namespace penstock
