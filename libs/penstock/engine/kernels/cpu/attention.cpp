#include "attention.h"

#include "head_columns.h"
#include "head_lanes.h"
#if defined(__AMX_BF16__)
#include "head_amx.h"
#include "heads_amx.h"
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

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

// Whether attention is computed in tiles: the processor has them, and keys and values of bfloat16 fill whole tiles.
bool in_tiles(const Model &model) {
  return kTiles && model.kv_kind == BFLOAT16 && model.head_dim % 32 == 0 && model.block_size % 16 == 0;
}

// Whether it is computed in pairs: the processor multiplies them, and keys and values of bfloat16 fill whole vectors.
bool in_pairs(const Model &model) {
  return kProducts && model.kv_kind == BFLOAT16 && model.head_dim % (2 * kLanes) == 0;
}

constexpr int kAlone = -1;  // no other sequence has the same pages
constexpr int kFew = 16;  // so many queries, or fewer, look at a shared piece in lanes: columns would be empty in part
constexpr int kPiecedQueries = 2 * kTile;  // most that have units for each piece

}  // namespace

Attention::Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch)
    : model_(model),
      step_(step),
      qkv_(qkv),
      mixed_(mixed),
      group_(model.heads / model.kv_heads) {
  const int members = team_size(team);
  int64_t room = std::max(
      {HeadLanes<F32Cache>::room(model), HeadsInLanes<F32Cache>::room(model), HeadColumns<F32Cache>::room(model)});
#if defined(__AMX_BF16__)
  if (in_tiles(model)) room = std::max(HeadTiles::room(model), HeadsInTiles::room(model));
#endif
  room_size_ = (room + kTile * Seen::size(model.head_dim) + 15) / 16 * 16;
  room_ = scratch.floats(room_size_ * members);
  int chunks = 0;
  for (int sequence = 0; sequence < step.sequences; ++sequence) {
    chunks += pieces(sequence);
    even_ += int64_t(pieces(sequence)) * rows(sequence) * model.heads;
  }
  share_ = chunks * model.kv_heads / (2 * members), even_ /= members;
  for (int sequence = 0; sequence < step.sequences; ++sequence) units_of(sequence);
  units_of_pieces();
  parts_ = scratch.floats(all_parts_);
  left_ = std::vector<std::atomic<int>>(shares_.size());
  for (size_t i = 0; i < shares_.size(); ++i) left_[i] = shares_[i];
}

// The units of neighbouring heads follow each other, because their keys are neighbours in memory.
void Attention::add(std::vector<Unit> &units, Unit unit) {
  const int together = heads_together(unit);
  for (unit.kv_head = 0; unit.kv_head < model_.kv_heads; unit.kv_head += unit.heads) {
    unit.heads = std::min(together, model_.kv_heads - unit.kv_head);
    units.push_back(unit);
  }
}

// How many key heads a unit takes.
int Attention::heads_together(const Unit &unit) const {
  if (!few(unit)) return 1;
  const int queries = unit.to - unit.from;
#if defined(__AMX_BF16__)
  if (in_tiles(model_)) return share_ >= model_.kv_heads ? HeadsInTiles::together(queries, model_.kv_heads) : 1;
#endif
  const int most = std::clamp(std::min(share_, HeadsInLanes<F32Cache>::kMost / queries), 1, model_.kv_heads);
  const int units = (model_.kv_heads + most - 1) / most;
  return (model_.kv_heads + units - 1) / units;  // alike in all units
}

// Whether it has all queries of a sequence, and these are few.
bool Attention::few(const Unit &unit) const {
  return unit.joint < 0 && unit.from == 0 && unit.to > 0 && unit.to <= kLanes;
}

// Whether any of these rows is sampled.
bool Attention::is_sampled(int first, int last) const {
  const int32_t *next = std::lower_bound(step_.sampled, step_.sampled + step_.samples, first);
  return next < step_.sampled + step_.samples && *next < last;
}

void Attention::units_of(int sequence) {
  const int first = step_.first[sequence], last = step_.first[sequence + 1], count = pieces(sequence);
  const int queries = rows(sequence) * group_, most = kTile / group_;  // rows that look together
  // Many have units for each piece only where one for all pieces would be more than a thread's share.
  const bool uneven = int64_t(count) * std::min(queries, kTile) > even_;
  const bool pieced = count > 1 && most && queries <= (uneven ? kPiecedQueries : kQueries);
  if (queries <= kTile && !pieced) {
    add(units_, {sequence, 0, 0, count, 0, queries, false, is_sampled(first, last)});
    return;
  }
  const bool kept = queries > kTile;
  if (kept) add(keeps_, {sequence, 0, 0, count, 0, 0, false, false});
  if (!pieced) {
    for (int from = 0; from < queries; from += kTile) {
      const int to = std::min(from + kTile, queries);
      const bool needed = is_sampled(first + from / group_, first + (to - 1) / group_ + 1);
      add(units_, {sequence, 0, 0, count, from, to, true, needed});
    }
    return;
  }
  for (int row = first; row < last; row += most) {
    const int end = std::min(row + most, last);
    pieced_.push_back({sequence, row, end, kept, is_sampled(row, end), int(shares_.size()), all_parts_});
    all_parts_ += model_.kv_heads * count * int64_t(end - row) * group_ * Seen::size(model_.head_dim);
    shares_.insert(shares_.end(), model_.kv_heads, count * (end - row));
  }
}

// One piece after the other. Sequences that part do not meet again, for a page stands for all that comes before it too.
void Attention::units_of_pieces() {
  std::vector<int> group(pieced_.size(), 0), next(pieced_.size());  // the first of those with the same pages so far
  int most = 0;
  for (const Pieced &own : pieced_) most = std::max(most, pieces(own.sequence));
  for (int piece = 0; piece < most; ++piece, group.swap(next)) {
    std::fill(next.begin(), next.end(), kAlone);
    for (int i = 0; i < int(pieced_.size()); ++i) {
      if (next[i] != kAlone || piece >= pieces(pieced_[i].sequence)) continue;
      std::vector<int> sharers{i};
      for (int j = i + 1; j < int(pieced_.size()) && group[i] != kAlone; ++j)
        if (group[j] == group[i] && next[j] == kAlone && same_pages(i, j, piece)) sharers.push_back(j);
      if (sharers.size() == 1) {
        const Pieced &own = pieced_[i];
        const int from = query_of(own), to = from + own.rows() * group_;
        add(units_, {own.sequence, 0, piece, piece + 1, from, to, own.kept, own.needed, i});
        continue;
      }
      for (int sharer : sharers) next[sharer] = i;
      join(sharers, piece);
    }
  }
}

// Whether two sequences have the same pages where a piece is, and both have it all behind them.
bool Attention::same_pages(int one, int other, int piece) const {
  const int begin = piece * kPiece, end = begin + kPiece, size = model_.block_size;
  const int a = pieced_[one].sequence, b = pieced_[other].sequence;
  if (std::min(step_.position[step_.first[a]], step_.position[step_.first[b]]) < end) return false;
  const int32_t *from = step_.table + step_.table_at[a];
  return std::equal(from + begin / size, from + (end + size - 1) / size,
                    step_.table + step_.table_at[b] + begin / size);
}

// Units of a piece that several sequences share, with as many rows as look together.
void Attention::join(const std::vector<int> &sharers, int piece) {
  std::vector<Row> all;
  for (int sharer : sharers) {
    for (int row = pieced_[sharer].first; row < pieced_[sharer].last; ++row) all.push_back({row, sharer});
  }
  std::stable_sort(all.begin(), all.end(), [this](const Row &one, const Row &other) {
    return step_.position[one.row] < step_.position[other.row];
  });
  const int most = std::max(1, kTile / group_), count = int(all.size());
  for (int from = 0; from < count; from += most) {
    const int to = std::min(from + most, count), queries = (to - from) * group_, number = int(joints_.size());
    joints_.emplace_back(all.begin() + from, all.begin() + to);
    add(units_, {pieced_[sharers[0]].sequence, 0, piece, piece + 1, 0, queries, true, true, -1, number});
  }
}

int Attention::pieces(int sequence) const { return step_.position[step_.first[sequence + 1] - 1] / kPiece + 1; }

int Attention::rows(int sequence) const { return step_.first[sequence + 1] - step_.first[sequence]; }

float *Attention::part(const Pieced &own, int kv_head, int piece, int row) const {
  const int64_t size = group_ * Seen::size(model_.head_dim);
  return parts_ + own.parts + ((int64_t(kv_head) * pieces(own.sequence) + piece) * own.rows() + row) * size;
}

void Attention::keep(int layer, int chunk, int member) { run(layer, keeps_[chunk], member, true); }

void Attention::keep_vector(int layer, int row, const float *vector, int member) {
  const int sequence = int(std::upper_bound(step_.first, step_.first + step_.sequences, row) - step_.first) - 1;
  float *room = room_ + room_size_ * member;
  auto keep = [&]<class Cache>(Cache) {
    HeadLanes<Cache>(model_, step_, layer, sequence, 0, qkv_, Room{room}).keep_vector(row, vector);
  };
  switch (model_.kv_kind) {
    case FLOAT32: return keep(F32Cache());
    case BFLOAT16: return keep(Bf16Cache());
    default: return keep(Int8Cache());
  }
}

void Attention::run(int layer, int chunk, int member, bool sampled) { run(layer, units_[chunk], member, sampled); }

void Attention::run(int layer, const Unit &unit, int member, bool sampled) {
  float *room = room_ + room_size_ * member;
  switch (model_.kv_kind) {
    case FLOAT32: return run_as<F32Cache>(layer, unit, room, sampled);
    case BFLOAT16:
      if (in_tiles(model_)) return run_in_tiles(layer, unit, room, sampled);
      if (in_pairs(model_)) return run_as<PairsCache>(layer, unit, room, sampled);
      return run_as<Bf16Cache>(layer, unit, room, sampled);
    default: return run_as<Int8Cache>(layer, unit, room, sampled);
  }
}

template <class Cache> void Attention::run_as(int layer, const Unit &unit, float *room, bool sampled) {
  if (kColumns && unit.to - unit.from > (unit.joint < 0 ? kQueries : kFew))
    return run_as<HeadColumns<Cache>, HeadLanes<Cache>>(layer, unit, room, sampled);
  if (unit.heads > 1) return run_together<HeadsInLanes<Cache>, HeadLanes<Cache>>(layer, unit, room, sampled);
  run_as<HeadLanes<Cache>, HeadLanes<Cache>>(layer, unit, room, sampled);
}

void Attention::run_in_tiles([[maybe_unused]] int layer, [[maybe_unused]] const Unit &unit,
                             [[maybe_unused]] float *room, [[maybe_unused]] bool sampled) {
#if defined(__AMX_BF16__)
  if (few(unit)) return run_together<HeadsInTiles, HeadTiles>(layer, unit, room, sampled);
  run_as<HeadTiles, HeadTiles>(layer, unit, room, sampled);
#endif
}

// `Way` is how the unit's queries look, `Own` how those of one row do.
template <class Way, class Own> void Attention::run_as(int layer, const Unit &unit, float *room, bool sampled) {
  if (unit.joint >= 0) return run_joint<Way, Own>(layer, unit, room, sampled);
  Way head(model_, step_, layer, unit.sequence, unit.kv_head, qkv_, Room{room});
  if (!unit.kept) head.keep(unit.begin * kPiece, unit.end * kPiece);
  if (sampled && !unit.needed) return;
  if (unit.pieced < 0) {
    for (int from = unit.from; from < unit.to; from += Way::kMost) {
      head.ask(from, std::min(from + Way::kMost, unit.to));
      head.look_through();
      head.finish(mixed_);
    }
    return;
  }
  const Pieced &own = pieced_[unit.pieced];
  float *to = part(own, unit.kv_head, unit.begin, 0);
  for (int from = unit.from; from < unit.to; from += Way::kMost) {
    head.ask(from, std::min(from + Way::kMost, unit.to));
    head.look(unit.begin, to + int64_t(from - unit.from) * Seen::size(model_.head_dim));
  }
  if (done(own, unit.kv_head, own.rows())) finish(own, unit.kv_head, head);
}

// `Together` is how the unit's heads look, `Way` how one of them does.
template <class Together, class Way>
void Attention::run_together(int layer, const Unit &unit, float *room, bool sampled) {
  Room own{room};
  const int queries = unit.to - unit.from;
  const int64_t size = queries * Seen::size(model_.head_dim);
  float *seen = own.take(unit.heads * size);
  auto head = [&](int number) { return Way(model_, step_, layer, unit.sequence, unit.kv_head + number, qkv_, own); };
  for (int number = 0; number < unit.heads && !unit.kept; ++number)
    head(number).keep(unit.begin * kPiece, unit.end * kPiece);
  if (sampled && !unit.needed) return;
  Together(model_, step_, layer, unit.sequence, unit.kv_head, unit.heads, qkv_, own).look(unit.begin, seen);
  for (int number = 0; number < unit.heads; ++number) {
    Way single = head(number);
    if (unit.pieced < 0) {
      single.choose(0, queries);
      single.forget();
      single.join(seen + number * size);
      single.finish(mixed_);
      continue;
    }
    const Pieced &whose = pieced_[unit.pieced];
    std::memcpy(part(whose, unit.kv_head + number, unit.begin, 0), seen + number * size, size * sizeof(float));
    if (done(whose, unit.kv_head + number, whose.rows())) finish(whose, unit.kv_head + number, single);
  }
}

template <class Way, class Own> void Attention::run_joint(int layer, const Unit &unit, float *room, bool sampled) {
  const std::vector<Row> &joint = joints_[unit.joint];
  const int64_t size = Seen::size(model_.head_dim);
  Room own{room};
  float *seen = own.take(unit.to * size);
  int32_t list[kTile];
  for (size_t i = 0; i < joint.size(); ++i) list[i] = joint[i].row;
  Way head(model_, step_, layer, unit.sequence, unit.kv_head, qkv_, own);
  head.gather(list);
  for (int from = 0; from < unit.to; from += Way::kMost) {
    head.ask(from, std::min(from + Way::kMost, unit.to));
    head.look(unit.begin, seen + from * size);
  }
  for (size_t i = 0; i < joint.size(); ++i) {
    const Pieced &whose = pieced_[joint[i].pieced];
    if (sampled && !whose.needed) continue;
    float *to = part(whose, unit.kv_head, unit.begin, joint[i].row - whose.first);
    std::memcpy(to, seen + int64_t(i) * group_ * size, group_ * size * sizeof(float));
    if (!done(whose, unit.kv_head, 1)) continue;
    Own single(model_, step_, layer, whose.sequence, unit.kv_head, qkv_, own);
    finish(whose, unit.kv_head, single);
  }
}

// Counts rows that have looked at a piece; returns whether these were the head's last.
bool Attention::done(const Pieced &own, int kv_head, int rows) {
  std::atomic<int> &left = left_[own.shared + kv_head];
  if (left.fetch_sub(rows, std::memory_order_acq_rel) > rows) return false;
  left.store(shares_[own.shared + kv_head], std::memory_order_relaxed);  // reset for the next layer
  return true;
}

// Joins what the queries of a head have seen in all pieces.
template <class Way> void Attention::finish(const Pieced &own, int kv_head, Way &head) {
  const int first = query_of(own), count = own.rows() * group_;
  for (int from = 0; from < count; from += Way::kMost) {
    head.choose(first + from, first + std::min(from + Way::kMost, count));
    head.forget();
    for (int piece = 0; piece < pieces(own.sequence); ++piece)
      head.join(part(own, kv_head, piece, 0) + int64_t(from) * Seen::size(model_.head_dim));
    head.finish(mixed_);
  }
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
