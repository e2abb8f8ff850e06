// The decoder for a few rows: one pass over the weights, everything else kept in the cache.
//
// Compiled for one instruction set: the vectors of lanes.h are the compiler's own and become whatever registers it has. A row's result never depends on which other rows are computed with it: every
// sum runs in an order that is fixed by the matrix alone, so a sequence's tokens do not depend on the batch.

#include "lanes.h"
#include "thin.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace penstock {

namespace {

constexpr int kExpandFrom = 5;  // rows from which a panel is worth turning into floats once
// How many rows' and panels' sums fit into the registers: 16 in the narrower builds, 32 in the widest.
constexpr int kRows = kWidth == 16 ? 6 : kWidth == 8 ? 3 : 2;
constexpr int kTogether = kWidth == 16 ? 4 : kWidth == 8 ? 2 : 1;
constexpr int kAlone = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 2;

// Two consecutive inputs' weights of 16 columns, as floats.
template <Kind kind> inline void pair(const char *at, Floats &even, Floats &odd) {
  if constexpr (kind == F32) {
    even = Floats::load(reinterpret_cast<const float *>(at));
    odd = Floats::load(reinterpret_cast<const float *>(at) + kLanes);
  } else if constexpr (kind == BF16) {
    split(at, even, odd);
  } else {
    even = Floats::load(reinterpret_cast<const int8_t *>(at));
    odd = Floats::load(reinterpret_cast<const int8_t *>(at) + kLanes);
  }
}
template <Kind kind> constexpr int kPairBytes = kind == F32 ? 128 : kind == BF16 ? 64 : 32;

// Sums of R rows over P neighbouring panels of 16 columns. Every sum goes through the inputs in order, whatever R and
// P are; enough of them run side by side to hide the latency of an addition.
template <Kind kind, int R, int P>
void sums(const char *panel, size_t panel_bytes, int in, const float *x, int stride, Floats (&sum)[R][P]) {
  Floats running[R][P] = {};
  for (int k = 0; k < in; k += 2)
    for (int p = 0; p < P; ++p) {
      Floats even, odd;
      pair<kind>(panel + p * panel_bytes + size_t(k / 2) * kPairBytes<kind>, even, odd);
      for (int r = 0; r < R; ++r) running[r][p].add(even, x[r * stride + k]);
      for (int r = 0; r < R; ++r) running[r][p].add(odd, x[r * stride + k + 1]);
    }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = running[r][p];
}

// Calls `take(row, panel, sum)` for P panels from `panel` on and R rows at a time, then for what is left of the rows.
template <Kind kind, int R, int P, class Take>
void rows_of(const char *data, size_t bytes, int in, const float *x, int stride, int row, int rows, int panel, Take &take) {
  for (; row + R <= rows; row += R) {
    Floats sum[R][P];
    sums<kind, R, P>(data, bytes, in, x + int64_t(row) * stride, stride, sum);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) take(row + r, panel + p, sum[r][p]);
  }
  if constexpr (R > 1)
    if (row < rows) rows_of<kind, R - 1, P>(data, bytes, in, x, stride, row, rows, panel, take);
}

// The same for P panels; those of many rows are turned into floats once.
template <Kind kind, int R, int P, class Take>
void panels_of(const char *data, size_t bytes, int in, const float *x, int stride, int rows, float *room, int panel, Take &take) {
  if (kind == F32 || rows < kExpandFrom) return rows_of<kind, R, P>(data, bytes, in, x, stride, 0, rows, panel, take);
  for (int p = 0; p < P; ++p)
    for (int k = 0; k < in; k += 2) {
      Floats even, odd;
      pair<kind>(data + p * bytes + size_t(k / 2) * kPairBytes<kind>, even, odd);
      even.store(room + (int64_t(p) * in + k) * kLanes);
      odd.store(room + (int64_t(p) * in + k + 1) * kLanes);
    }
  rows_of<F32, R, P>(reinterpret_cast<char *>(room), size_t(in) * kLanes * 4, in, x, stride, 0, rows, panel, take);
}

// Calls `take(row, panel, sum)` for the panels [from, to) of `matrix` and all rows of `x`.
template <Kind kind, class Take>
void panels(const Linear &matrix, int from, int to, const float *x, int stride, int rows, float *room, Take take) {
  const size_t bytes = size_t(matrix.in / 2) * kPairBytes<kind>;
  const char *data = static_cast<const char *>(matrix.data);
  int at = from;
  if (rows == 1)
    for (; at + kAlone <= to; at += kAlone)
      panels_of<kind, 1, kAlone>(data + at * bytes, bytes, matrix.in, x, stride, rows, room, at, take);
  else
    for (; at + kTogether <= to; at += kTogether)
      panels_of<kind, kRows, kTogether>(data + at * bytes, bytes, matrix.in, x, stride, rows, room, at, take);
  for (; at < to; ++at)
    panels_of<kind, kRows, 1>(data + at * bytes, bytes, matrix.in, x, stride, rows, room, at, take);
}

// The share of `count` things that is this member's: [from, to).
struct Share {
  Share(int from, int to) : from(from), to(to) {}
  Share(int count, int member, int size) : from(int64_t(count) * member / size), to(int64_t(count) * (member + 1) / size) {}
  int from, to;
};

inline Floats finished(const Linear &matrix, int panel, Floats sum) {
  if (matrix.kind == INT8) sum *= Floats::load(matrix.scale + panel * kLanes);
  if (matrix.bias) sum += Floats::load(matrix.bias + panel * kLanes);
  return sum;
}

template <class Take>
void product(const Linear &matrix, Share share, const float *x, int stride, int rows, float *room, Take take) {
  auto scaled = [&](int row, int panel, Floats sum) { take(row, panel, finished(matrix, panel, sum)); };
  switch (matrix.kind) {
    case F32: return panels<F32>(matrix, share.from, share.to, x, stride, rows, room, scaled);
    case BF16: return panels<BF16>(matrix, share.from, share.to, x, stride, rows, room, scaled);
    default: return panels<INT8>(matrix, share.from, share.to, x, stride, rows, room, scaled);
  }
}

void normalise(const float *x, const float *weight, int size, float eps, float *out) {
  Floats squares = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) squares.add(Floats::load(x + i), Floats::load(x + i));
  float sum = squares.total();
  for (int rest = i; rest < size; ++rest) sum += x[rest] * x[rest];
  const float scale = 1.0f / std::sqrt(sum / size + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) (Floats::load(x + i) * scale * Floats::load(weight + i)).store(out + i);
  for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

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

// One step's work, shared by the members of the team.
struct Work {
  Team *team;
  const Model &model;
  const Step &step;
  float *normed;   // [members][rows][hidden]
  float *qkv;      // [rows][(heads + 2 kv_heads) head_dim]
  float *mixed;    // [rows][heads head_dim]
  float *inner;    // [rows][intermediate]
  float *scores;   // [members][heads / kv_heads][longest context]
  float *room;     // [members][largest in * 16]
  int longest, widest;
};

template <class Cache> struct Pages {
  using Number = typename Cache::Number;
  const Model &model;
  int layer;
  Number *token(int32_t page, int which, int at, int head) const {
    const int64_t run = (int64_t(page) * model.layers + layer) * 2 + which;
    return static_cast<Number *>(model.pool) +
           ((run * model.block_size + at) * model.kv_heads + head) * model.head_dim;
  }
};

// Turns and stores head `head` (queries, then keys, then values) of row `row`.
template <class Cache> void place(const Work &work, const Pages<Cache> &pages, const Layer &layer, int row, int sequence, int head) {
  const Model &model = work.model;
  const int dim = model.head_dim, half = dim / 2, position = work.step.position[row];
  float *x = work.qkv + (int64_t(row) * (model.heads + 2 * model.kv_heads) + head) * dim;
  if (head < model.heads + model.kv_heads) {
    if (layer.qk_norm) normalise(x, layer.qk_norm + head * dim, dim, model.eps, x);
    const float *cosine = model.cosine + int64_t(position) * dim, *sine = model.sine + int64_t(position) * dim;
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] + b * sine[i];
      x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
  }
  if (head < model.heads) return;
  const int which = head >= model.heads + model.kv_heads;
  const int kv_head = head - model.heads - which * model.kv_heads;
  const int32_t page = work.step.table[work.step.table_at[sequence] + position / model.block_size];
  auto *to = pages.token(page, which, position % model.block_size, kv_head);
  for (int i = 0; i < dim; ++i) Cache::put(to + i, x[i]);
}

// The queries of one row that share key head `kv_head`.
template <class Cache> void attend(const Work &work, const Pages<Cache> &pages, int row, int sequence, int kv_head, float *scores) {
  const Model &model = work.model;
  const int dim = model.head_dim, group = model.heads / model.kv_heads, size = model.block_size;
  const int tokens = work.step.position[row] + 1;
  const int window = model.layer[pages.layer].window, begin = window && tokens > window ? tokens - window : 0;
  const int32_t *table = work.step.table + work.step.table_at[sequence];
  const float *query = work.qkv + (int64_t(row) * (model.heads + 2 * model.kv_heads) + kv_head * group) * dim;
  const int64_t stride = int64_t(model.kv_heads) * dim;
  // Scores of the tokens [begin, tokens), a page at a time.
  for (int token = begin; token < tokens;) {
    const int at = token % size, count = tokens - token < size - at ? tokens - token : size - at;
    const auto *key = pages.token(table[token / size], 0, at, kv_head);
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
        const auto *value = pages.token(table[token / size], 1, at, kv_head) + i;
        for (int t = 0; t < count; ++t, value += stride)
          for (int v = 0; v < vectors; ++v) mixed[v].add(Floats::load(value + v * kLanes), score[token - begin + t]);
        token += count;
      }
      for (int v = 0; v < vectors; ++v) (mixed[v] * whole).store(out + i + v * kLanes);
    }
  }
}

template <class Cache> void decode(const Work &work, int member) {
  const Model &model = work.model;
  const Step &step = work.step;
  const int size = team_size(work.team), rows = step.rows, hidden = model.hidden;
  const int heads = model.heads + 2 * model.kv_heads, wide = heads * model.head_dim;
  const int narrow = model.heads * model.head_dim, group = model.heads / model.kv_heads;
  float *normed = work.normed + int64_t(member) * rows * hidden;
  float *scores = work.scores + int64_t(member) * group * work.longest;
  float *room = work.room + int64_t(member) * work.widest * kLanes * kTogether;
  std::vector<int> sequence(rows);
  for (int s = 0; s < step.sequences; ++s)
    for (int row = step.first[s]; row < step.first[s + 1]; ++row) sequence[row] = s;

  auto share = [&](int count) { return Share(count, member, size); };
  auto add = [&](int row, int panel, Floats sum) {
    float *at = step.x + int64_t(row) * hidden + panel * kLanes;
    (Floats::load(at) + sum).store(at);
  };
  for (int number = 0; number < model.layers; ++number) {
    const Layer &layer = model.layer[number];
    const Pages<Cache> pages{model, number};
    for (int row = 0; row < rows; ++row)
      normalise(step.x + int64_t(row) * hidden, layer.input_norm, hidden, model.eps, normed + row * hidden);
    product(layer.qkv, share(layer.qkv.out / kLanes), normed, hidden, rows, room,
            [&](int row, int panel, Floats sum) { sum.store(work.qkv + int64_t(row) * wide + panel * kLanes); });
    team_meet(work.team, member);
    const Share placed = share(rows * heads);
    for (int i = placed.from; i < placed.to; ++i) place(work, pages, layer, i / heads, sequence[i / heads], i % heads);
    team_meet(work.team, member);
    const Share attended = share(rows * model.kv_heads);
    for (int i = attended.from; i < attended.to; ++i)
      attend(work, pages, i / model.kv_heads, sequence[i / model.kv_heads], i % model.kv_heads, scores);
    team_meet(work.team, member);
    product(layer.output, share(layer.output.out / kLanes), work.mixed, narrow, rows, room, add);
    team_meet(work.team, member);
    for (int row = 0; row < rows; ++row)
      normalise(step.x + int64_t(row) * hidden, layer.mlp_norm, hidden, model.eps, normed + row * hidden);
    const int width = model.intermediate / kLanes;  // panels of gate, and then as many of up
    const Share gates = share(width), ups(gates.from + width, gates.to + width);
    auto inner = [&](int row, int panel) { return work.inner + int64_t(row) * model.intermediate + panel * kLanes; };
    product(layer.gate_up, gates, normed, hidden, rows, room,
            [&](int row, int panel, Floats sum) { silu(sum).store(inner(row, panel)); });
    product(layer.gate_up, ups, normed, hidden, rows, room, [&](int row, int panel, Floats sum) {
      float *at = inner(row, panel - width);
      (Floats::load(at) * sum).store(at);
    });
    team_meet(work.team, member);
    product(layer.down, share(layer.down.out / kLanes), work.inner, model.intermediate, rows, room, add);
    team_meet(work.team, member);
  }
  for (int i = 0; i < step.samples; ++i)
    normalise(step.x + int64_t(step.sampled[i]) * hidden, model.norm, hidden, model.eps, normed + i * hidden);
  product(model.head, share(model.head.out / kLanes), normed, hidden, step.samples, room,
          [&](int row, int panel, Floats sum) {
            const int at = panel * kLanes, count = model.vocab - at < kLanes ? model.vocab - at : kLanes;
            if (count > 0) std::memcpy(step.logits + int64_t(row) * model.vocab + at, &sum, count * sizeof(float));
          });
}

int largest_in(const Model &model) {
  int most = model.hidden;
  for (int in : {model.heads * model.head_dim, model.intermediate}) most = in > most ? in : most;
  return most;
}

// A job over the columns of one matrix.
struct Single {
  Team *team;
  const Linear &matrix;
  const float *x;
  int rows;
  float *room, *out;
};

template <Kind kind> void unpack_panel(const Linear &matrix, int panel, float *out, int stride) {
  const char *data = static_cast<const char *>(matrix.data) + size_t(panel) * (matrix.in / 2) * kPairBytes<kind>;
  for (int k = 0; k < matrix.in; k += 2, data += kPairBytes<kind>) {
    Floats even, odd;
    pair<kind>(data, even, odd);
    if (kind == INT8) {
      const Floats scale = Floats::load(matrix.scale + panel * kLanes);
      even *= scale, odd *= scale;
    }
    even.store(out + int64_t(k) * stride);
    odd.store(out + int64_t(k + 1) * stride);
  }
}

}  // namespace

void forward(Team *team, const Model &model, const Step &step) {
  const int rows = step.rows, members = team_size(team), group = model.heads / model.kv_heads;
  int longest = 0;
  for (int row = 0; row < rows; ++row) longest = step.position[row] + 1 > longest ? step.position[row] + 1 : longest;
  longest = (longest + kLanes - 1) / kLanes * kLanes;
  const int widest = rows >= kExpandFrom ? largest_in(model) : 0;
  const int64_t sizes[] = {int64_t(members) * rows * model.hidden,
                           int64_t(rows) * (model.heads + 2 * model.kv_heads) * model.head_dim,
                           int64_t(rows) * model.heads * model.head_dim,
                           int64_t(rows) * model.intermediate,
                           int64_t(members) * group * longest,
                           int64_t(members) * widest * kLanes * kTogether};
  int64_t all = 0;
  for (int64_t size : sizes) all += size;
  static thread_local std::vector<float> scratch;  // of the thread that drives the engine
  if (int64_t(scratch.size()) < all) scratch.resize(all + all / 4);
  float *at[6], *next = scratch.data();
  for (int i = 0; i < 6; ++i) at[i] = next, next += sizes[i];
  Work work{team, model, step, at[0], at[1], at[2], at[3], at[4], at[5], longest, widest};
  team_run(team, [](void *context, int member) {
    const Work &work = *static_cast<Work *>(context);
    work.model.kv_kind == BF16 ? decode<Bf16Cache>(work, member) : decode<F32Cache>(work, member);
  }, &work);
}

void linear(Team *team, const Linear &matrix, const float *x, int rows, float *out) {
  std::vector<float> room(rows >= kExpandFrom ? size_t(team_size(team)) * matrix.in * kLanes * kTogether : 0);
  Single job{team, matrix, x, rows, room.data(), out};
  team_run(team, [](void *context, int member) {
    const Single &job = *static_cast<Single *>(context);
    const Share share(job.matrix.out / kLanes, member, team_size(job.team));
    float *room = job.room + (job.rows >= kExpandFrom ? size_t(member) * job.matrix.in * kLanes * kTogether : 0);
    product(job.matrix, share, job.x, job.matrix.in, job.rows, room, [&](int row, int panel, Floats sum) {
      sum.store(job.out + int64_t(row) * job.matrix.out + panel * kLanes);
    });
  }, &job);
}

// The panels [from, to) as floats [in, 16 * (to - from)].
void unpack(Team *team, const Linear &matrix, int from, int to, float *out) {
  struct Piece {
    Team *team;
    const Linear &matrix;
    int from, to;
    float *out;
  } piece{team, matrix, from, to, out};
  team_run(team, [](void *context, int member) {
    const Piece &piece = *static_cast<Piece *>(context);
    const Share share(piece.to - piece.from, member, team_size(piece.team));
    const int stride = (piece.to - piece.from) * kLanes;
    for (int i = share.from; i < share.to; ++i) {
      float *out = piece.out + i * kLanes;
      switch (piece.matrix.kind) {
        case F32: unpack_panel<F32>(piece.matrix, piece.from + i, out, stride); break;
        case BF16: unpack_panel<BF16>(piece.matrix, piece.from + i, out, stride); break;
        default: unpack_panel<INT8>(piece.matrix, piece.from + i, out, stride);
      }
    }
  }, &piece);
}

}  // namespace penstock
