// Attention of a few rows over the pages where their keys and values are.
#pragma once
#include "kernels.h"
#include "scratch.h"

#include <atomic>
#include <vector>

namespace penstock {

constexpr int kPiece = 512;  // positions of a piece of a context

// One step's attention, in chunks that threads take: a key head of a sequence each, or some pieces of a long context.
//
// A context is cut into pieces by position. Each piece has a maximum, a sum and a mix of its own, and they are joined
// in the order of position (FlashDecoding, Dao et al. 2023), by the thread that finishes last where several share
// them. A sum's order follows from positions alone: not from the batch, the run's rows, or threads.
class Attention {
 public:
  // `qkv` [rows, (heads + 2 kv_heads) head_dim] is read; `mixed` [rows, heads head_dim] is written.
  Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch);

  // Chunks of a first phase, which keeps the keys and values of runs of many rows; other runs keep theirs themselves.
  int keeping() const { return int(keeps_.size()); }
  void keep(int layer, int chunk, int member);
  // Those of the second. `sampled`: only rows that are sampled, or stand beside one, are wanted.
  int chunks() const { return int(units_.size()); }
  void run(int layer, int chunk, int member, bool sampled = false);

 private:
  struct Unit {
    int sequence, kv_head;
    int begin, end;  // pieces, which it keeps too unless another has
    int from, to;    // queries: the rows' heads that share the key head
    bool kept, needed;
    int shared;     // which entry of `left_` counts the units of this head; -1 where there is but one
    int64_t parts;  // where in `parts_` the head's pieces begin
  };

  void run(int layer, const Unit &unit, int member, bool mixes);
  template <class Way> void run(int layer, const Unit &unit, float *room, bool mixes);
  void units_of(int sequence, bool needed);
  int pieces(int sequence) const;

  const Model &model_;
  const Step &step_;
  const float *qkv_;
  float *mixed_;
  std::vector<Unit> units_, keeps_;
  int64_t all_parts_ = 0;
  std::vector<std::atomic<int>> left_;  // units that are not done
  std::vector<int> shares_;             // units there are
  float *parts_, *room_;                // what was seen in pieces of split heads; each member's own memory
  int64_t room_size_;
};

// A step's attention in layer 0 alone.
void attend(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed);

// x / rms(x) * weight
void normalise(const float *x, const float *weight, int size, float eps, float *out);
float norm_factor(const float *x, int size, float eps);

}  // namespace penstock
