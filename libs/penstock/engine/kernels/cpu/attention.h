// Attention of the rows of a step, over keys and values where they lie on their pages.
#pragma once
#include "kernels.h"
#include "scratch.h"

#include <atomic>
#include <vector>

namespace penstock {

constexpr int kPiece = 512;  // positions in one piece of a context

// The attention of one step, in chunks that threads take. A chunk is one key head of a sequence, or some pieces of a
// long context.
//
// A context is cut into pieces by position. Each piece has its own maximum, sum and mix. These are joined in the order
// of position (FlashDecoding, Dao et al. 2023); where several threads share the pieces of a head, the one that finishes
// last joins them. So the order of additions depends on positions alone, not on the batch, the run's rows or threads.
class Attention {
 public:
  // Reads `qkv` [rows, (heads + 2 kv_heads) head_dim] and writes `mixed` [rows, heads head_dim].
  Attention(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed, Scratch &scratch);

  // The chunks of the first phase, which stores the keys and values of runs with many rows. Those of other runs are
  // stored in the second phase.
  int keeping() const { return int(keeps_.size()); }
  void keep(int layer, int chunk, int member);
  // The chunks of the second phase. `sampled`: it computes only rows that are sampled, and their neighbours.
  int chunks() const { return int(units_.size()); }
  void run(int layer, int chunk, int member, bool sampled = false);

 private:
  struct Unit {
    int sequence, kv_head;
    int begin, end;  // pieces; it also stores their keys and values unless that was done before
    int from, to;    // queries: those heads of the rows that share the key head
    bool kept, needed;
    int shared;     // the entry of `left_` that counts the units of this head; -1 if there is only one
    int64_t parts;  // where the head's pieces begin in `parts_`
  };

  void run(int layer, const Unit &unit, int member, bool mixes);
  template <class Cache> void run_as(int layer, const Unit &unit, float *room, bool mixes);
  template <class Way> void run(int layer, const Unit &unit, float *room, bool mixes);
  void units_of(int sequence, bool needed);
  int pieces(int sequence) const;

  const Model &model_;
  const Step &step_;
  const float *qkv_;
  float *mixed_;
  std::vector<Unit> units_, keeps_;
  int64_t all_parts_ = 0;
  std::vector<std::atomic<int>> left_;  // for each shared head, its units that are not done
  std::vector<int> shares_;             // for each shared head, all its units
  float *parts_, *room_;                // results of the pieces of shared heads; memory of each thread
  int64_t room_size_;
};

// Computes a step's attention in layer 0 only.
void attend(Team *team, const Model &model, const Step &step, const float *qkv, float *mixed);

// x / rms(x) * weight
void normalise(const float *x, const float *weight, int size, float eps, float *out);
float norm_factor(const float *x, int size, float eps);

}  // namespace penstock
