#include "attention.h"

#include "head_columns.h"
#include "head_lanes.h"
#if defined(__AMX_BF16__)
#include "head_amx.h"
#endif

#include <algorithm>
#include <cmath>

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

#if !defined(__AMX_BF16__)
using HeadTiles = HeadLanes<Bf16Cache>;  // only so that the code compiles: it is never chosen
#endif

// Whether attention is computed in tiles: the processor has them, and keys and values of bfloat16 fill whole tiles.
bool in_tiles(const Model &model) {
  return kTiles && model.kv_kind == BFLOAT16 && model.head_dim % 32 == 0 && model.block_size % 16 == 0;
}

// Whether it is computed in pairs: the processor multiplies them, and keys and values of bfloat16 fill whole vectors.
bool in_pairs(const Model &model) {
  return kProducts && model.kv_kind == BFLOAT16 && model.head_dim % (2 * kLanes) == 0;
}

}  // namespace

Attention::Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch)
    : model_(model),
      step_(step),
      qkv_(qkv),
      mixed_(mixed) {
  const int members = team_size(team);
  const int64_t room = in_tiles(model) ? HeadTiles::room(model)
                                       : std::max(HeadLanes<F32Cache>::room(model), HeadColumns<F32Cache>::room(model));
  room_size_ = (room + 15) / 16 * 16;
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

// The units of neighbouring heads follow each other, because their keys are neighbours in memory.
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
    case FLOAT32: return run_as<F32Cache>(layer, unit, room, mixes);
    case BFLOAT16:
      if (in_tiles(model_)) return run<HeadTiles>(layer, unit, room, mixes);
      if (in_pairs(model_)) return run_as<PairsCache>(layer, unit, room, mixes);
      return run_as<Bf16Cache>(layer, unit, room, mixes);
    default: return run_as<Int8Cache>(layer, unit, room, mixes);
  }
}

template <class Cache> void Attention::run_as(int layer, const Unit &unit, float *room, bool mixes) {
  if (kColumns && unit.to - unit.from > kQueries) return run<HeadColumns<Cache>>(layer, unit, room, mixes);
  run<HeadLanes<Cache>>(layer, unit, room, mixes);
}

template <class Way> void Attention::run(int layer, const Unit &unit, float *room, bool mixes) {
  Way head(model_, step_, layer, unit.sequence, unit.kv_head, qkv_, Room{room});
  if (!unit.kept) head.keep(unit.begin * kPiece, unit.end * kPiece);
  if (!mixes) return;
  if (unit.shared < 0) {
    for (int from = unit.from; from < unit.to; from += Way::kMost) {
      head.ask(from, std::min(from + Way::kMost, unit.to));
      head.look_through();
      head.finish(mixed_);
    }
    return;
  }
  head.ask(0, head.queries());
  const int64_t size = head.queries() * Seen::size(model_.head_dim);
  for (int piece = unit.begin; piece < unit.end; ++piece) head.look(piece, parts_ + unit.parts + piece * size);
  if (left_[unit.shared].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  left_[unit.shared].store(shares_[unit.shared], std::memory_order_relaxed);  // reset for the next layer
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
