// Attention of the rows of a step, over keys and values where they lie on their pages.
#pragma once
#include "kernels.h"
#include "scratch.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace penstock {

constexpr int kPiece = 512;  // positions in one piece of a context

// The attention of one step, in chunks that threads take. A chunk is one key head of a sequence or, in tiles, several,
// some pieces of a long context, or a piece that several sequences share.
//
// A context is cut into pieces by position. Each piece has its own maximum, sum and mix. These are joined in the order
// of position (FlashDecoding, Dao et al. 2023); where several threads share the pieces of a head, the one that finishes
// last joins them. So the order of additions depends on positions alone, not on the batch, the run's rows or threads.
//
// Where sequences have the same pages, their rows look at a piece together, and it is read once for all of them (as in
// cascade inference, Ye et al. 2024). What each row sees of the piece is joined as if it had looked alone.
class Attention {
 public:
  // Reads `qkv` [rows, asked_width] and writes `mixed` [rows, heads head_dim]. With latent attention they may be the
  // same memory: a row's result in a head is written when nobody needs the query there any more.
  Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch);

  // The chunks of the first phase, which stores the keys and values of runs with many rows. Those of other runs are
  // stored in the second phase.
  int keeping() const { return int(keeps_.size()); }
  void keep(int layer, int chunk, int member);
  // The chunks of the second phase. `sampled`: it computes only rows that are sampled, and their neighbours.
  int chunks() const { return int(units_.size()); }
  void run(int layer, int chunk, int member, bool sampled = false);
  // Stores the vector of a row from which latent attention makes its key and value. Nothing else does.
  void keep_vector(int layer, int row, const float *vector, int member);

 private:
  struct Unit {
    int sequence, kv_head;
    int begin, end;  // pieces; it also stores their keys and values unless that was done before
    int from, to;    // queries: those heads of the rows that share the key head
    bool kept, needed;
    int pieced = -1;  // the entry of `pieced_` if the head has several units
    int joint = -1;   // the entry of `joints_` if the rows are of several sequences
    int heads = 1;    // key heads from `kv_head` on
  };
  // Rows of a sequence, no more than look together, for which units of their own look at each piece.
  struct Pieced {
    int sequence;
    int first, last;  // rows of the step
    bool kept, needed;
    int shared;     // the entry of `left_` for its first head
    int64_t parts;  // where the results of its pieces begin in `parts_`
    int rows() const { return last - first; }
  };
  // A row that looks at a piece with others, and the entry of `pieced_` for its sequence.
  struct Row {
    int32_t row;
    int pieced;
  };

  void run(int layer, const Unit &unit, int member, bool sampled);
  template <class Cache> void run_as(int layer, const Unit &unit, float *room, bool sampled);
  template <class Way, class Own> void run_as(int layer, const Unit &unit, float *room, bool sampled);
  void run_in_tiles(int layer, const Unit &unit, float *room, bool sampled);
  template <class Together, class Way> void run_together(int layer, const Unit &unit, float *room, bool sampled);
  template <class Way, class Own> void run_joint(int layer, const Unit &unit, float *room, bool sampled);
  bool done(const Pieced &own, int kv_head, int rows);
  template <class Way> void finish(const Pieced &own, int kv_head, Way &head);
  int query_of(const Pieced &own) const { return (own.first - step_.first[own.sequence]) * group_; }

  void add(std::vector<Unit> &units, Unit unit);
  int heads_together(const Unit &unit) const;
  bool few(const Unit &unit) const;
  void units_of(int sequence);
  void units_of_pieces();
  void join(const std::vector<int> &sharers, int piece);
  bool same_pages(int one, int other, int piece) const;
  bool is_sampled(int first, int last) const;
  int pieces(int sequence) const;
  int rows(int sequence) const;
  float *part(const Pieced &own, int kv_head, int piece, int row) const;

  const Model &model_;
  const Step &step_;
  const float *qkv_;
  float *mixed_;
  const int group_;
  int share_ = 0;     // how many heads of a piece a unit may take so that there are enough for all threads
  int64_t even_ = 0;  // how many pieces each thread would look at for one query, if all had as many
  std::vector<Unit> units_, keeps_;
  std::vector<Pieced> pieced_;
  std::vector<std::vector<Row>> joints_;  // by position
  int64_t all_parts_ = 0;
  std::vector<std::atomic<int>> left_;  // for each head of `pieced_`, how often a row has still to look at a piece
  std::vector<int> shares_;             // the same before a layer begins
  float *parts_, *room_;                // results of pieces; memory of each thread
  int64_t room_size_;
};

// The numbers of a row that attention reads: queries, keys and values; of latent attention, queries alone.
inline int64_t asked_width(const Model &model) {
  return int64_t(model.heads + (model.rank ? 0 : 2 * model.kv_heads)) * model.head_dim;
}

// Computes a step's attention in layer 0 only.
void attend(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed);

typedef float Eight __attribute__((vector_size(32)));

// Turns the dimensions of `x` by the place of a row, of which the tables have the rows; `out` may be `x`.
inline void rotate(const float *x, int dim, const float *cosine, const float *sine, bool interleaved, float *out) {
  auto at = [](const float *from) {
    Eight eight;
    std::memcpy(&eight, from, sizeof eight);
    return eight;
  };
  if (interleaved) {
    for (int i = 0; i < dim; i += 8) {
      const Eight a = at(x + i), partners = __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6);
      const Eight turned = a * at(cosine + i) + partners * at(sine + i);
      std::memcpy(out + i, &turned, sizeof turned);
    }
    return;
  }
  for (int i = 0, half = dim / 2; i < half; i += 8) {
    const Eight a = at(x + i), b = at(x + i + half);
    const Eight first = a * at(cosine + i) + b * at(sine + i);
    const Eight second = b * at(cosine + i + half) + a * at(sine + i + half);
    std::memcpy(out + i, &first, sizeof first);
    std::memcpy(out + i + half, &second, sizeof second);
  }
}

// x / rms(x) * weight
void normalise(const float *x, const float *weight, int size, float eps, float *out);
float norm_factor(const float *x, int size, float eps);

}  // namespace penstock
