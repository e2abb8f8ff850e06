// The decoder: one pass over the weights for all rows; everything else stays in the caches.
//
// A row's result never depends on the rows that are computed with it: the matrix and the positions alone fix the order
// of every sum. So a sequence's tokens depend neither on the batch nor on how its prompt was cut.
#include "adapters.h"
#include "attention.h"
#include "best.h"
#include "products.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace penstock {

namespace {

// The rows for which products are computed, in slabs that fit the nearer caches.
class Rows {
 public:
  // `chosen` are `count` rows of the step; null stands for the first `count`. `kind` is that of the matrices.
  Rows(int count, const int32_t *chosen, int kind) : count_(count), chosen_(chosen) {
    for (int row = 0; row < count; row += kSlab) slabs_.emplace_back(std::min(count - row, kSlab), kind);
  }
  int count() const { return count_; }
  int slabs() const { return int(slabs_.size()); }
  const Blocks &blocks(int slab) const { return slabs_[slab]; }
  int number(int slab, int row) const { return slab * kSlab + row; }
  int row(int slab, int row) const { return chosen_ ? chosen_[number(slab, row)] : number(slab, row); }

  // The number of blocks; each is packed as a chunk of its own.
  int all_blocks() const { return slabs_.empty() ? 0 : (slabs() - 1) * slabs_[0].count + slabs_.back().count; }

 private:
  const int count_;
  const int32_t *chosen_;
  std::vector<Blocks> slabs_;
};

class Pass {
 public:
  Pass(Team *team, const Model &model, const Step &step)
      : team_(team),
        model_(model),
        step_(step),
        all_(step.rows, nullptr, model.head.kind),
        last_(step.samples, step.sampled, model.head.kind),
        shared_(step.rows > 2 * kMostRows),
        packed_(kTiles && rounds(model.head.kind) && !step.adapter),
        qkv_(floats(wide())),
        mixed_(floats(narrow())),
        inner_(floats(int(packed_width(model.intermediate)))),
        shrunk_(floats(step.ranks)),
        attention_(team, model, step, qkv_, mixed_, scratch_) {
    const int members = team_size(team), slab = std::min(step.rows, kSlab);
    const int64_t sums = int64_t(slab) * kGang * kLanes, room = kRoom;
    const int64_t packed = step.rows * packed_width(std::max({model.hidden, narrow(), model.intermediate}));
    float *next = scratch_.floats(members * (2 * sums + room) + (shared_ ? 1 : members) * packed);
    auto take = [&](int64_t count) { return next += count, next - count; };
    float *x = take(packed);
    for (int i = 0; i < members; ++i)
      members_.push_back({i && !shared_ ? take(packed) : x, take(2 * sums), take(room), -1});
  }

  void run() {
    add(EMBED, 0, model_.table ? (step_.rows + kTogether - 1) / kTogether : 0);
    for (int layer = 0; layer < model_.layers; ++layer) {
      const Layer &own = model_.layer[layer];
      const Rows &rows =
          layer + 1 < model_.layers ? all_ : last_;  // after the last attention, only the sampled rows are needed
      product_of(QKV, layer, own.qkv.outputs, all_);
      add(KEEP, layer, attention_.keeping());
      add(ATTENTION, layer, attention_.chunks());
      product_of(OUTPUT, layer, own.output.outputs, rows);
      product_of(GATE_UP, layer, model_.intermediate, rows);
      product_of(DOWN, layer, own.down.outputs, rows);
      if (tap_ < step_.tap_count && step_.taps[tap_] == layer + 1)
        phases_.push_back({TAP, NONE, layer, (step_.features + kTogether - 1) / kTogether, tap_++});
      if (step_.between) compute(), reinterpret_cast<void (*)()>(step_.between)();
    }
    product_of(HEAD, model_.layers, model_.head.outputs, last_);
    add(BEST, model_.layers, step_.best ? step_.samples : 0);
    compute();
  }

 private:
  enum Job { EMBED, KEEP, ATTENTION, SHRINK, PACK_ROWS, MULTIPLY, TAP, BEST };
  enum Product { NONE, QKV, OUTPUT, GATE_UP, DOWN, HEAD };  // the product whose rows are packed, or that is computed
  static constexpr int kTogether = 16;                      // rows that one chunk embeds, or keeps
  struct Phase {
    Job job;
    Product product;
    int layer, chunks;
    int size;  // panels in a chunk; of TAP, which of the taps it is
  };
  struct alignas(64) Member {
    float *x;     // [rows, in], packed for the current phase; shared by all members if there are many rows
    float *sums;  // a slab's sums, twice
    float *room;
    int ready;  // the phase for which x is packed
  };

  // Computes the phases that were added since the last call.
  void compute() {
    std::vector<int> chunks;
    for (size_t at = computed_; at < phases_.size(); ++at) chunks.push_back(phases_[at].chunks);
    team_run(
        team_, int(chunks.size()), chunks.data(),
        [](void *self, int phase, int chunk, int member) {
          Pass &pass = *static_cast<Pass *>(self);
          pass.chunk(pass.computed_ + phase, chunk, member);
        },
        this);
    computed_ = int(phases_.size());
  }

  int wide() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
  int narrow() const { return model_.heads * model_.head_dim; }
  float *floats(int width) { return scratch_.floats(int64_t(step_.rows) * width); }

  void add(Job job, int layer, int chunks) { phases_.push_back({job, NONE, layer, chunks, 0}); }

  // Adds two phases: pack the rows, multiply. If there are few rows, the first has no chunks: each member packs all
  // rows for itself, which costs less than waiting for each other. Nor has it any if the rows were written packed.
  void product_of(Product product, int layer, int columns, const Rows &rows) {
    if (step_.adapter && product != HEAD)
      phases_.push_back({SHRINK, product, layer, rows.count() * kAdapterParts, 0});
    const int panels = columns / kLanes;
    const bool halved = product == GATE_UP && kGang > 8;  // a chunk takes panels of two matrices
    const int size = halved ? (size_of(panels) + 7) / 8 * 4 : size_of(panels);
    phases_.push_back({PACK_ROWS, product, layer, shared_ && !is_packed(product) ? rows.all_blocks() : 0, 0});
    phases_.push_back({MULTIPLY, product, layer, rows.slabs() ? (panels + size - 1) / size : 0, size});
  }

  // Whether the product before this one has written its rows packed.
  bool is_packed(Product product) const { return packed_ && product == DOWN; }

  // The number of panels in a chunk: small enough that every member gets some, and whole gangs where there are many.
  // With many rows in tiles, pairs of panels make chunks that members can share evenly.
  int size_of(int panels) const {
    const int members = team_size(team_);
    if (members == 1) return kGang;
    int size = std::clamp(panels / (members * 4) / 4 * 4, 4, kGang);
    auto most = [&](int size) { return (panels + size * members - 1) / (size * members) * size; };  // of one member
    if (packed_ && shared_)
      for (int other = size + 2, end = std::min(2 * size, kGang); other <= end; other += 2)
        if (most(other) < most(size)) size = other;
    return size;
  }

  const Rows &rows_of(const Phase &phase) const {
    return phase.product == QKV || phase.layer + 1 < model_.layers ? all_ : last_;
  }

  void chunk(int number, int chunk, int who) {
    const Phase &phase = phases_[number];
    Member &member = members_[who];
    switch (phase.job) {
      case EMBED: return embed(chunk * kTogether, std::min((chunk + 1) * kTogether, step_.rows));
      case KEEP: return attention_.keep(phase.layer, chunk, who);
      case ATTENTION: return attention_.run(phase.layer, chunk, who, phase.layer + 1 == model_.layers);
      case SHRINK: return shrink_row(phase, chunk / kAdapterParts, chunk % kAdapterParts);
      case PACK_ROWS: return pack_rows(phase, member.x, chunk);
      case MULTIPLY: return multiply(phase, number, chunk * phase.size, member);
      case TAP: return tap(phase.size, chunk * kTogether, std::min((chunk + 1) * kTogether, step_.features));
      case BEST: step_.best[chunk] = best_of(chunk);
    }
  }

  // Multiplies all rows with the chunk of panels from `first` on, in phase `number`.
  void multiply(const Phase &phase, int number, int first, Member &member) {
    const Rows &rows = rows_of(phase);
    if (!shared_ && !is_packed(phase.product) && member.ready != number) {
      member.ready = number;
      for (int block = 0; block < rows.all_blocks(); ++block) pack_rows(phase, member.x, block);
    }
    for (int slab = 0; slab < rows.slabs(); ++slab) multiply(phase, rows, slab, first, member);
  }

  void embed(int first, int last) {
    const int width = model_.hidden;
    for (int row = first; row < last; ++row) {
      const int64_t at = int64_t(step_.ids[row]) * width;
      float *to = step_.x + int64_t(row) * width;
      for (int i = 0; i < width; i += kLanes)
        (model_.table_kind == FLOAT32 ? Floats::load(static_cast<const float *>(model_.table) + at + i)
                                      : Floats::load(static_cast<const uint16_t *>(model_.table) + at + i))
            .store(to + i);
    }
  }

  // Keeps the states of the featured rows [first, last).
  void tap(int number, int first, int last) {
    const int64_t width = model_.hidden;
    for (int at = first; at < last; ++at)
      std::memcpy(step_.states + (int64_t(at) * step_.tap_count + number) * width, step_.x + step_.featured[at] * width,
                  width * sizeof(float));
  }

  // Returns the most probable token of a sample among those that are legal.
  int best_of(int sample) const {
    const float *own = step_.logits + int64_t(sample) * model_.vocab;
    const Legal *legal = step_.legal;
    const int row = legal ? legal->row[sample] : -1;
    if (row < 0) return best(own, model_.vocab);
    while (!__atomic_load_n(legal->ready, __ATOMIC_ACQUIRE)) std::this_thread::yield();
    return best(own, model_.vocab, legal->bits + int64_t(row) * legal->words);
  }

  AdapterParts parts_of(const Phase &phase, int number) const {
    const bool any = step_.adapter && phase.product != HEAD;
    return AdapterParts(any ? step_.adapter[rows_of(phase).row(0, number)] : nullptr, phase.layer, phase.product - QKV);
  }

  // Multiplies a row with one of the thin matrices of its adapter.
  void shrink_row(const Phase &phase, int number, int which) {
    const AdapterParts parts = parts_of(phase, number);
    if (which >= parts.count) return;
    const int row = rows_of(phase).row(0, number);
    const AdapterPart &part = parts.first[which];
    auto multiplied = [&](int in, auto value) {
      float *to = shrunk_ + int64_t(number) * step_.ranks;
      parts.kind == FLOAT32 ? shrink<float>(part, in, value, to) : shrink<uint16_t>(part, in, value, to);
    };
    if (phase.product == OUTPUT || phase.product == DOWN) {
      const int in = phase.product == OUTPUT ? narrow() : model_.intermediate;
      const float *from =
          phase.product == OUTPUT ? mixed_ + int64_t(row) * in : inner_ + int64_t(number) * in;
      return multiplied(in, [&](int k) { return Floats::load(from + k); });
    }
    const float *from = step_.x + int64_t(row) * model_.hidden, *weight = norm_of(phase);
    const float factor = norm_factor(from, model_.hidden, model_.eps);
    multiplied(model_.hidden,
               [&](int k) { return Floats::load(from + k) * factor * Floats::load(weight + k); });
  }

  // What the adapter of a row adds to a panel of its product.
  Floats expanded(const Phase &phase, int number, int panel) const {
    const AdapterParts parts = parts_of(phase, number);
    const float *shrunk = shrunk_ + int64_t(number) * step_.ranks;
    return parts.kind == FLOAT32 ? expand<float>(parts, panel, shrunk) : expand<uint16_t>(parts, panel, shrunk);
  }

  // Packs one block of the rows that are multiplied.
  void pack_rows(const Phase &phase, float *x, int number) {
    const Rows &rows = rows_of(phase);
    const int slab = number / rows.blocks(0).count, block = number % rows.blocks(0).count;
    const Blocks &blocks = rows.blocks(slab);
    const int first = blocks.first(block), size = blocks.size(block);
    auto packed = [&](int in) { return x + rows.number(slab, first) * packed_width(in); };
    switch (phase.product) {
      case OUTPUT: {
        const int in = narrow();
        return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
          return Floats::load(mixed_ + int64_t(rows.row(slab, first + r)) * in + k);
        });
      }
      case DOWN: {
        const int in = model_.intermediate;
        return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
          return Floats::load(inner_ + int64_t(rows.number(slab, first + r)) * in + k);
        });
      }
      default: {
        const int in = model_.hidden;
        const float *weight = norm_of(phase);
        const float *from[kMostRows];
        float factor[kMostRows];
        for (int r = 0; r < size; ++r) {
          from[r] = step_.x + int64_t(rows.row(slab, first + r)) * in;
          factor[r] = norm_factor(from[r], in, model_.eps);
        }
        return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
          return Floats::load(from[r] + k) * factor[r] * Floats::load(weight + k);
        });
      }
    }
  }

  void multiply(const Phase &phase, const Rows &rows, int slab, int first, Member &member) {
    const Blocks &blocks = rows.blocks(slab);
    const Linear &matrix = matrix_of(phase);
    const int width = (phase.product == GATE_UP ? model_.intermediate : matrix.outputs) / kLanes,
              count = std::min(width - first, phase.size);
    const float *packed = is_packed(phase.product) ? inner_ : member.x,
                *x = packed + rows.number(slab, 0) * packed_width(matrix.inputs);
    const bool adapted = step_.adapter && phase.product != HEAD;
    auto each = [&](auto take) {
      if (!adapted) return product(matrix, first, count, x, blocks, member.room, member.sums, take);
      product(matrix, first, count, x, blocks, member.room, member.sums, [&](int row, int panel, Floats sum) {
        take(row, panel, sum + expanded(phase, rows.number(slab, row), panel));
      });
    };
    switch (phase.product) {
      case QKV:
        return each([&](int row, int panel, Floats sum) {
          sum.store(qkv_ + int64_t(rows.number(slab, row)) * wide() + panel * kLanes);
        });
      case GATE_UP: {
        float *ups = member.sums + int64_t(blocks.rows) * kGang * kLanes;
        penstock::multiply(matrix, width + first, count, x, blocks, member.room, ups);
        auto inner = [&](int row, int panel, const Floats &gate) {
          Floats up = finished(matrix, width + panel, Floats::load(ups + (int64_t(row) * kGang + panel - first) * kLanes));
          if (adapted) up += expanded(phase, rows.number(slab, row), width + panel);
          return silu(gate) * up;
        };
        const int wide = model_.intermediate;
        if (!packed_)
          return each([&](int row, int panel, Floats gate) {
            inner(row, panel, gate).store(inner_ + int64_t(rows.number(slab, row)) * wide + panel * kLanes);
          });
        PackedRow to[kSlab];
        for (int block = 0; block < blocks.count; ++block) {
          const int begin = blocks.first(block), size = blocks.size(block);
          float *packed = inner_ + int64_t(rows.number(slab, begin)) * packed_width(wide);
          for (int r = 0; r < size; ++r) to[begin + r] = PackedRow(packed, size, r);
        }
        return each(
            [&](int row, int panel, Floats gate) { to[row].put(panel * kLanes, wide, inner(row, panel, gate)); });
      }
      case HEAD:
        return each([&](int row, int panel, Floats sum) {
          const int at = panel * kLanes, some = std::min(model_.vocab - at, kLanes);
          if (some > 0)
            std::memcpy(step_.logits + int64_t(rows.number(slab, row)) * model_.vocab + at, &sum, some * sizeof(float));
        });
      default:
        return each([&](int row, int panel, Floats sum) {
          float *to = step_.x + int64_t(rows.row(slab, row)) * model_.hidden + panel * kLanes;
          (Floats::load(to) + sum).store(to);
        });
    }
  }

  // The weights with which rows of the residual stream are normalised before a product.
  const float *norm_of(const Phase &phase) const {
    if (phase.product == HEAD) return model_.norm;
    const Layer &layer = model_.layer[phase.layer];
    return phase.product == QKV ? layer.input_norm : layer.mlp_norm;
  }

  const Linear &matrix_of(const Phase &phase) const {
    if (phase.product == HEAD) return model_.head;
    const Layer &layer = model_.layer[phase.layer];
    switch (phase.product) {
      case QKV: return layer.qkv;
      case OUTPUT: return layer.output;
      case GATE_UP: return layer.gate_up;
      default: return layer.down;
    }
  }

  Team *team_;
  const Model &model_;
  const Step &step_;
  const Rows all_, last_;
  const bool shared_;  // whether rows are packed once for all members
  const bool packed_;  // whether inner_ is written packed for tiles
  Scratch scratch_;
  float *const qkv_, *const mixed_, *const inner_;  // [rows, wide()], [rows, narrow()], [rows, intermediate]
  float *const shrunk_;                             // [rows, ranks]: rows in the middle of their adapters' products
  Attention attention_;
  std::vector<Member> members_;
  std::vector<Phase> phases_;
  int computed_ = 0;  // phases
  int tap_ = 0;       // taps that have their phases
};

}  // namespace

void forward(Team *team, const Model &model, const Step &step) { Pass(team, model, step).run(); }

}  // namespace penstock
