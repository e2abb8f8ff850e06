// The decoder for a few rows: one pass over the weights, everything else kept in the caches.
//
// A row's result never depends on which other rows are computed with it: every sum runs in an order that is fixed by
// the matrix alone, so a sequence's tokens do not depend on the batch.
#include "attention.h"
#include "products.h"
#include "scratch.h"

#include <cstring>
#include <optional>
#include <vector>

namespace penstock {

namespace {

enum Part { QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, PARTS };

class Pass {
 public:
  Pass(Team *team, const Model &model, const Step &step) : team_(team), model_(model), step_(step), blocks_(step.rows), last_(step.samples) {
    const int rows = step.rows, members = team_size(team), widest = largest_in();
    Scratch scratch;
    qkv_ = scratch.floats(int64_t(rows) * (model.heads + 2 * model.kv_heads) * model.head_dim);
    mixed_ = scratch.floats(int64_t(rows) * model.heads * model.head_dim);
    inner_ = scratch.floats(int64_t(rows) * model.intermediate);
    attention_.emplace(team, model, step, qkv_, mixed_, scratch);
    const int64_t sums = int64_t(rows) * kGang * kLanes, room = rows >= kExpandFrom ? kRoom : 0;
    float *all = scratch.floats(members * (int64_t(rows) * widest + 2 * sums + room));
    for (int i = 0; i < members; ++i) {
      Member &member = members_.emplace_back();
      member.x = all, all += int64_t(rows) * widest;
      member.sums = all, all += 2 * sums;
      member.room = all, all += room;
    }
  }

  void run() {
    const Layer &layer = model_.layer[0];
    sizes_[QKV] = size_of(layer.qkv.out), sizes_[OUTPUT] = size_of(layer.output.out);
    sizes_[GATE_UP] = size_of(model_.intermediate), sizes_[DOWN] = size_of(layer.down.out);
    const int counts[PARTS] = {chunks(layer.qkv.out, sizes_[QKV]), attention_->chunks(), chunks(layer.output.out, sizes_[OUTPUT]),
                               chunks(model_.intermediate, sizes_[GATE_UP]), chunks(layer.down.out, sizes_[DOWN])};
    std::vector<int> phases;
    for (int i = 0; i < model_.layers; ++i) phases.insert(phases.end(), counts, counts + PARTS);
    if (step_.samples) phases.push_back(chunks(model_.head.out, kGang));
    team_run(team_, int(phases.size()), phases.data(), [](void *self, int phase, int chunk, int member) {
      static_cast<Pass *>(self)->chunk(phase, chunk, member);
    }, this);
  }

 private:
  struct alignas(64) Member {
    float *x;       // [rows, in], packed: what the current phase multiplies
    float *sums;    // twice
    float *room;
    int ready = -1;  // the phase that x is for
  };

  int largest_in() const {
    int most = model_.hidden;
    for (int in : {model_.heads * model_.head_dim, model_.intermediate}) most = in > most ? in : most;
    return most;
  }

  // Panels of a chunk: few enough that every member gets some, and whole gangs where there are many.
  int size_of(int columns) const {
    const int panels = columns / kLanes, members = team_size(team_);
    if (members == 1) return kGang;
    const int fair = panels / (members * 4) / 4 * 4;
    return fair < 4 ? 4 : fair > kGang ? kGang : fair;
  }
  static int chunks(int columns, int size) { return (columns / kLanes + size - 1) / size; }

  void chunk(int phase, int chunk, int number) {
    Member &own = members_[number];
    const int at = phase / PARTS, part = phase % PARTS;
    const bool fresh = own.ready != phase;
    own.ready = phase;
    if (at == model_.layers) return head(own, chunk, fresh);
    const Layer &layer = model_.layer[at];
    auto added = [&](int row, int panel, Floats sum) {
      float *to = step_.x + int64_t(row) * model_.hidden + panel * kLanes;
      (Floats::load(to) + sum).store(to);
    };
    switch (part) {
      case QKV: {
        const int wide = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
        if (fresh) pack_normed(own, blocks_, nullptr, layer.input_norm);
        return panels(own, layer.qkv, part, chunk, [&](int row, int panel, Floats sum) {
          sum.store(qkv_ + int64_t(row) * wide + panel * kLanes);
        });
      }
      case ATTENTION:
        return attention_->run(at, chunk, number);
      case OUTPUT:
        if (fresh) pack(own, mixed_, model_.heads * model_.head_dim);
        return panels(own, layer.output, part, chunk, added);
      case GATE_UP: {
        if (fresh) pack_normed(own, blocks_, nullptr, layer.mlp_norm);
        const int width = model_.intermediate / kLanes, first = chunk * sizes_[part];
        const int count = width - first < sizes_[part] ? width - first : sizes_[part];
        float *ups = own.sums + int64_t(step_.rows) * kGang * kLanes;
        multiply(layer.gate_up, width + first, count, own.x, blocks_, own.room, ups);
        return product(layer.gate_up, first, count, own.x, blocks_, own.room, own.sums, [&](int row, int panel, Floats sum) {
          const Floats up = Floats::load(ups + (int64_t(row) * kGang + panel - first) * kLanes);
          (silu(sum) * finished(layer.gate_up, width + panel, up)).store(inner_ + int64_t(row) * model_.intermediate + panel * kLanes);
        });
      }
      default:
        if (fresh) pack(own, inner_, model_.intermediate);
        return panels(own, layer.down, part, chunk, added);
    }
  }

  void head(Member &own, int chunk, bool fresh) {
    if (fresh) pack_normed(own, last_, step_.sampled, model_.norm);
    const int all = model_.head.out / kLanes, first = chunk * kGang;
    product(model_.head, first, all - first < kGang ? all - first : kGang, own.x, last_, own.room, own.sums,
            [&](int row, int panel, Floats sum) {
              const int at = panel * kLanes, count = model_.vocab - at < kLanes ? model_.vocab - at : kLanes;
              if (count > 0) std::memcpy(step_.logits + int64_t(row) * model_.vocab + at, &sum, count * sizeof(float));
            });
  }

  template <class Take> void panels(Member &own, const Linear &matrix, int part, int chunk, Take take) {
    const int all = matrix.out / kLanes, first = chunk * sizes_[part];
    product(matrix, first, all - first < sizes_[part] ? all - first : sizes_[part], own.x, blocks_, own.room, own.sums, take);
  }

  // Rows of `from` [rows, in] for a product.
  void pack(Member &own, const float *from, int in) {
    for (int block = 0; block < blocks_.count; ++block) {
      const float *rows = from + int64_t(blocks_.first(block)) * in;
      pack_block(blocks_.size(block), in, own.x + int64_t(blocks_.first(block)) * in,
                 [&](int r, int k) { return Floats::load(rows + int64_t(r) * in + k); });
    }
  }

  // The same for normalised rows of the residual stream: all, or those that `chosen` lists.
  void pack_normed(Member &own, const Blocks &blocks, const int32_t *chosen, const float *weight) {
    const int in = model_.hidden;
    for (int block = 0; block < blocks.count; ++block) {
      const float *rows[kRows];
      float factor[kRows];
      for (int r = 0; r < blocks.size(block); ++r) {
        const int row = blocks.first(block) + r;
        rows[r] = step_.x + int64_t(chosen ? chosen[row] : row) * in;
        factor[r] = norm_factor(rows[r], in, model_.eps);
      }
      pack_block(blocks.size(block), in, own.x + int64_t(blocks.first(block)) * in,
                 [&](int r, int k) { return Floats::load(rows[r] + k) * factor[r] * Floats::load(weight + k); });
    }
  }

  Team *team_;
  const Model &model_;
  const Step &step_;
  const Blocks blocks_, last_;
  std::vector<Member> members_;
  float *qkv_, *mixed_, *inner_;  // [rows, (heads + 2 kv_heads) head_dim], [rows, heads head_dim], [rows, intermediate]
  std::optional<Attention> attention_;
  int sizes_[PARTS] = {};  // panels of a chunk
};

}  // namespace

void forward(Team *team, const Model &model, const Step &step) { Pass(team, model, step).run(); }

}  // namespace penstock
