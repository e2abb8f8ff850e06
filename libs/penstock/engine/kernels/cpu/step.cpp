// The decoder: one pass over the weights for all rows; everything else stays in the caches.
//
// A row's result never depends on the rows that are computed with it: the matrix and the positions alone fix the order
// of every sum. So a sequence's tokens depend neither on the batch nor on how its prompt was cut.
#include "adapters.h"
#include "attention.h"
#include "best.h"
#include "meeting.h"
#include "products.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

namespace penstock {

namespace {

// The rows for which products are computed, in slabs that fit the nearer caches.
class Rows {
 public:
  // `chosen` are rows of the step, of which `count` from `begin` on are meant; null stands for the rows' own numbers.
  // `kind` is that of the matrices.
  Rows(int count, const int32_t *chosen, int kind, int begin = 0) : count_(count), begin_(begin), chosen_(chosen) {
    for (int row = 0; row < count; row += kSlab) slabs_.emplace_back(std::min(count - row, kSlab), kind);
  }
  int count() const { return count_; }
  int slabs() const { return int(slabs_.size()); }
  const Blocks &blocks(int slab) const { return slabs_[slab]; }
  int number(int slab, int row) const { return begin_ + slab * kSlab + row; }
  int row(int slab, int row) const { return chosen_ ? chosen_[number(slab, row)] : number(slab, row); }

  // The number of blocks; each is packed as a chunk of its own.
  int all_blocks() const { return slabs_.empty() ? 0 : (slabs() - 1) * slabs_[0].count + slabs_.back().count; }

 private:
  int count_, begin_;
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
        queries_(model.query_rank ? floats(model.heads * (model.plain_dim + model.turned_dim)) : qkv_),
        asked_(model.rank ? floats(int(asked_width(model))) : qkv_),
        attended_(model.rank ? asked_ : mixed_),
        inner_(floats(packed_width(model.intermediate))),
        expert_inner_(scratch_.floats(places() * packed_width(model.expert_intermediate))),
        picks_(places()),
        rows_(places()),
        shares_(2 * places()),
        scores_(floats(int(packed_width(model.experts)))),
        parts_(step.rows > kRoutedApart ? 1  // there are rows enough for all threads
                                        : std::clamp(int(int64_t(model.experts) * model.hidden / kRouterPart), 1,
                                                     std::max(1, model.experts / 4))),
        scored_(groups_of(all_)),
        shrunk_(floats(step.thin)),
        attention_(team, model, step, asked_, attended_, scratch_) {
    const int members = team_size(team), slab = std::min(step.rows, kSlab);
    const int64_t sums = int64_t(slab) * kGang * kLanes, room = kRoom;
    const int64_t packed =
        std::max(step.rows * packed_width(std::max({model.hidden, narrow(), model.intermediate, model.query_rank})),
                 places() * packed_width(std::max(model.hidden, model.expert_intermediate)));
    const int64_t head = model.rank ? slab * packed_width(std::max(model.head_dim, model.plain_dim)) : 0;
    const int64_t routing = model.experts ? std::max<int64_t>(model.hidden, 2 * packed_width(model.experts)) : 0;
    float *next = scratch_.floats(members * (2 * sums + room + routing + head) + (shared_ ? 1 : members) * packed);
    auto take = [&](int64_t count) { return next += count, next - count; };
    float *x = take(packed);
    for (int i = 0; i < members; ++i)
      members_.push_back({i && !shared_ ? take(packed) : x, take(2 * sums), take(room), take(routing), take(head), -1});
  }

  // Returns false when another rank is lost.
  bool run() {
    add(EMBED, 0, model_.table ? (step_.rows + kTogether - 1) / kTogether : 0);
    for (int layer = 0; layer < model_.layers; ++layer) {
      const Layer &own = model_.layer[layer];
      const Rows &rows =
          layer + 1 < model_.layers ? all_ : last_;  // after the last attention, only the sampled rows are needed
      product_of(QKV, layer, own.qkv.outputs, all_);
      if (model_.rank)
        latent_attention(layer, rows);
      else
        add(KEEP, layer, attention_.keeping()), add(ATTENTION, layer, attention_.chunks());
      product_of(OUTPUT, layer, own.output.outputs, rows);
      sum_over_ranks(layer, rows);
      feed_forward(layer, rows);
      sum_over_ranks(layer, rows);
      if (tap_ < step_.tap_count && step_.taps[tap_] == layer + 1)
        phases_.push_back({TAP, NONE, layer, (step_.features + kTogether - 1) / kTogether, tap_++});
      if (step_.between) compute(), reinterpret_cast<void (*)()>(step_.between)();
    }
    if (step_.logits) product_of(HEAD, model_.layers, model_.head.outputs, last_);
    add(BEST, model_.layers, step_.best ? step_.samples : 0);
    compute();
    return !lost_;
  }

 private:
  enum Job { EMBED, KEEP, ABSORB, ATTENTION, RELEASE, ROUTE, SHRINK, PACK_ROWS, MULTIPLY, MEET, SUM, TAP, BEST };
  // The product whose rows are packed, or that is computed. The first five may have adapters.
  enum Product { NONE, QKV, OUTPUT, GATE_UP, DOWN, QUERY, EXPERT_GATE_UP, EXPERT_DOWN, HEAD };
  static constexpr int kTogether = 16, kRouted = 2;  // rows that one chunk embeds, or keeps; or routes
  static constexpr int kRoutedApart = 1024;          // rows up to which a router is cut
  static constexpr int kRouterPart = 1 << 17;        // numbers of a router that are worth a chunk of their own
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
    float *routing;  // a row, or what its choice takes
    float *head;     // a slab's rows in one head, packed
    int ready;       // the phase for which x is packed
  };
  // An expert that some rows have chosen. These stand together in `rows_`, and so do their results.
  struct Expert {
    int number;
    Rows rows;
  };

  // Computes the phases that were added since the last call.
  void compute() {
    chunks_.clear();
    for (size_t at = computed_; at < phases_.size(); ++at) chunks_.push_back(phases_[at].chunks);
    team_run(
        team_, int(chunks_.size()), chunks_.data(),
        [](void *self, int phase, int chunk, int member) {
          Pass &pass = *static_cast<Pass *>(self);
          pass.chunk(pass.computed_ + phase, chunk, member);
        },
        this);
    computed_ = int(phases_.size());
  }

  int wide() const { return model_.rank ? asks() + model_.head_dim : int(asked_width(model_)); }
  int narrow() const { return model_.heads * (model_.rank ? model_.value_dim : model_.head_dim); }
  // With latent attention, the columns of `qkv` before those of the vector that is kept.
  int asks() const { return model_.query_rank ? model_.query_rank : query_width(); }
  int query_width() const { return model_.heads * (model_.plain_dim + model_.turned_dim); }
  // Whether a layer has a block that all rows go through.
  bool is_dense(int layer) const { return model_.layer[layer].down.inputs > 0; }
  int64_t places() const { return int64_t(step_.rows) * model_.per_token; }  // of rows at experts
  float *floats(int width) { return scratch_.floats(int64_t(step_.rows) * width); }

  void add(Job job, int layer, int chunks) { phases_.push_back({job, NONE, layer, chunks, 0}); }

  // Adds the phases of latent attention in its absorbed form, see layers/latent.py. Of each of its matrices a head has
  // its own, and a chunk is a head with a slab of rows.
  void latent_attention(int layer, const Rows &rows) {
    if (model_.query_rank) product_of(QUERY, layer, query_width(), all_);
    add(ABSORB, layer, all_.slabs() * model_.heads + (step_.rows + kTogether - 1) / kTogether);
    add(ATTENTION, layer, attention_.chunks());
    add(RELEASE, layer, rows.slabs() * model_.heads);
  }

  // Brings queries to the vectors that are kept; the last chunks store these vectors.
  void absorb(int layer, int chunk, int who) {
    const int heads = model_.heads, plain = model_.plain_dim, turned = model_.turned_dim, rank = model_.rank;
    const Layer &own = model_.layer[layer];
    Member &member = members_[who];
    auto turn = [&](int row, const float *x, float *to) {
      const int64_t at = int64_t(step_.turned[row]) * turned;
      rotate(x, turned, model_.cosine + at, model_.sine + at, model_.interleaved, to);
    };
    if (chunk >= all_.slabs() * heads) {
      const int first = (chunk - all_.slabs() * heads) * kTogether;
      for (int row = first; row < std::min(first + kTogether, step_.rows); ++row) {
        const float *x = qkv_ + int64_t(row) * wide() + asks();
        normalise(x, own.latent_norm, rank, model_.latent_eps, member.room);
        turn(row, x + rank, member.room + rank);
        attention_.keep_vector(layer, row, member.room, who);
      }
      return;
    }
    const int slab = chunk / heads, head = chunk % heads, width = model_.query_rank ? query_width() : wide();
    auto query = [&](int row) { return queries_ + int64_t(row) * width + head * (plain + turned); };
    auto asked = [&](int row) { return asked_ + (int64_t(row) * heads + head) * model_.head_dim; };
    multiply_head(own.absorb[head], all_, slab, query, asked, member);
    for (int number = 0; number < all_.blocks(slab).rows; ++number) {
      const int row = all_.row(slab, number);
      turn(row, query(row) + plain, asked(row) + rank);
    }
  }

  // Makes values of what was mixed of the vectors.
  void release(const Rows &rows, int layer, int chunk, Member &member) {
    const int heads = model_.heads, slab = chunk / heads, head = chunk % heads;
    multiply_head(
        model_.layer[layer].release[head], rows, slab,
        [&](int row) { return attended_ + (int64_t(row) * heads + head) * model_.head_dim; },
        [&](int row) { return mixed_ + int64_t(row) * narrow() + head * model_.value_dim; }, member);
  }

  // Multiplies what a slab of rows has in a head: `from` and `to` say where that is of a row.
  template <class From, class To>
  void multiply_head(const Linear &matrix, const Rows &rows, int slab, From from, To to, Member &member) {
    const Blocks &blocks = rows.blocks(slab);
    const int in = matrix.inputs, panels = matrix.outputs / kLanes;
    for (int block = 0; block < blocks.count; ++block) {
      const int first = blocks.first(block);
      pack_block(matrix.kind, blocks.size(block), in, member.head + first * packed_width(in),
                 [&](int r, int k) { return Floats::load(from(rows.row(slab, first + r)) + k); });
    }
    for (int first = 0; first < panels; first += kGang)
      product(matrix, first, std::min(kGang, panels - first), member.head, blocks, member.room, member.sums,
              [&](int row, int panel, Floats sum) { sum.store(to(rows.row(slab, row)) + panel * kLanes); });
  }

  // Adds the phases of a layer's block that all rows go through, of its experts, or of both. Nothing is added to the
  // residual stream before all have read it.
  void feed_forward(int layer, const Rows &rows) {
    const Layer &own = model_.layer[layer];
    const bool dense = is_dense(layer);
    if (own.router) phases_.push_back({ROUTE, NONE, layer, groups_of(rows) * parts_, 0});
    if (dense) product_of(GATE_UP, layer, own.down.inputs, rows);
    if (own.router) product_of(EXPERT_GATE_UP, layer, model_.expert_intermediate, rows);
    if (dense) product_of(DOWN, layer, model_.hidden, rows);
    if (own.router) product_of(EXPERT_DOWN, layer, model_.hidden, rows);
  }

  // Where several ranks compute the model, what they add to the rows of the residual stream is in their places: adds
  // two phases, meet and add all of it. Each rank adds the same numbers in the same order.
  void sum_over_ranks(int layer, const Rows &rows) {
    if (!model_.ranks || !rows.count()) return;
    add(MEET, layer, 1);
    add(SUM, layer, (rows.count() + kTogether - 1) / kTogether);
  }

  void sum(const Rows &rows, int first) {
    if (lost_) return;
    for (int at = first; at < std::min(first + kTogether, rows.count()); ++at) {
      const int64_t from = int64_t(rows.row(0, at)) * model_.hidden;
      Meeting(*model_.ranks).add(from, model_.hidden, step_.x + from);
    }
  }

  // Where this process puts what a product adds to a row of the residual stream.
  float *added(int row) const {
    return (model_.ranks ? Meeting(*model_.ranks).own() : step_.x) + int64_t(row) * model_.hidden;
  }

  // Adds two phases: pack the rows, multiply. If there are few rows, the first has no chunks: each member packs all
  // rows for itself, which costs less than waiting for each other. Nor has it any if the rows were written packed. For
  // experts `arrange` counts the chunks.
  void product_of(Product product, int layer, int columns, const Rows &rows) {
    if (adapts(product)) phases_.push_back({SHRINK, product, layer, rows.count() * kAdapterParts, 0});
    const int panels = columns / kLanes;
    const bool halved = is_gated(product) && kGang > 8;  // a chunk takes panels of two matrices
    const int size = halved ? (size_of(panels) + 7) / 8 * 4 : size_of(panels);
    const bool routed = is_routed(product), later = product == EXPERT_GATE_UP;
    const int blocks = shared_ && !is_packed(product) && !routed ? rows.all_blocks() : 0;
    phases_.push_back({PACK_ROWS, product, layer, blocks, 0});
    phases_.push_back({MULTIPLY, product, layer, rows.slabs() && !later ? (panels + size - 1) / size : 0, size});
  }

  // Whether the product before this one has written its rows packed.
  bool is_packed(Product product) const { return packed_ && (product == DOWN || product == EXPERT_DOWN); }

  // Whether the product is one of experts.
  static bool is_routed(Product product) { return product == EXPERT_GATE_UP || product == EXPERT_DOWN; }

  // Whether its columns are those of a gate and of what it lets through.
  static bool is_gated(Product product) { return product == GATE_UP || product == EXPERT_GATE_UP; }

  // Where what is between two products of a block begins.
  float *inner_of(Product product) const { return is_routed(product) ? expert_inner_ : inner_; }

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
    const bool early = phase.product == QKV || phase.product == QUERY;
    return early || phase.layer + 1 < model_.layers ? all_ : last_;
  }

  void chunk(int number, int chunk, int who) {
    const Phase &phase = phases_[number];
    Member &member = members_[who];
    switch (phase.job) {
      case EMBED: return embed(chunk * kTogether, std::min((chunk + 1) * kTogether, step_.rows));
      case KEEP: return attention_.keep(phase.layer, chunk, who);
      case ABSORB: return absorb(phase.layer, chunk, who);
      case RELEASE: return release(rows_of(phase), phase.layer, chunk, member);
      case ATTENTION: return attention_.run(phase.layer, chunk, who, phase.layer + 1 == model_.layers);
      case ROUTE: return route(phase, number, chunk, member);
      case SHRINK: return shrink_row(phase, chunk / kAdapterParts, chunk % kAdapterParts, member);
      case PACK_ROWS: return pack_rows(phase, member.x, chunk);
      case MULTIPLY: return multiply(phase, number, chunk, member);
      case MEET: lost_ = lost_ || !Meeting(*model_.ranks).meet(); return;
      case SUM: return sum(rows_of(phase), chunk * kTogether);
      case TAP: return tap(phase.size, chunk * kTogether, std::min((chunk + 1) * kTogether, step_.features));
      case BEST: step_.best[chunk] = best_of(chunk);
    }
  }

  // Multiplies rows with a chunk of panels, in phase `number`. Of `down` a chunk has the same panels of all experts, so
  // that each row adds what they say in their order; of `gate_up`, those of one expert.
  void multiply(const Phase &phase, int number, int chunk, Member &member) {
    const bool routed = is_routed(phase.product);
    if (!shared_ && !is_packed(phase.product) && member.ready != number) {
      member.ready = number;
      const int blocks = routed ? blocks_ : rows_of(phase).all_blocks();
      for (int block = 0; block < blocks; ++block) pack_rows(phase, member.x, block);
    }
    if (!routed) return multiply(phase, matrix_of(phase), rows_of(phase), chunk * phase.size, member);
    const Layer &layer = model_.layer[phase.layer];
    if (phase.product == EXPERT_DOWN) {
      for (const Expert &expert : experts_)
        multiply(phase, layer.downs[expert.number], expert.rows, chunk * phase.size, member);
    } else {
      const int chunks = chunks_of(phase);
      const Expert &expert = experts_[chunk / chunks];
      multiply(phase, layer.gate_ups[expert.number], expert.rows, chunk % chunks * phase.size, member);
    }
  }

  void multiply(const Phase &phase, const Linear &matrix, const Rows &rows, int first, Member &member) {
    for (int slab = 0; slab < rows.slabs(); ++slab) multiply(phase, matrix, rows, slab, first, member);
  }

  // The number of chunks of one expert's `gate_up`.
  int chunks_of(const Phase &phase) const {
    return (model_.expert_intermediate / kLanes + phase.size - 1) / phase.size;
  }

  static int groups_of(const Rows &rows) { return (rows.count() + kRouted - 1) / kRouted; }

  // Computes the scores of a part of the experts for a group of rows. Whose part is the last of a group chooses for its
  // rows, as layers/feedforward.py says, but with softmax and sigmoids behind the choice where they don't count in it;
  // and whose group is the last arranges the rest.
  void route(const Phase &phase, int number, int chunk, Member &member) {
    const Layer &layer = model_.layer[phase.layer];
    const Rows &rows = rows_of(phase);
    const int group = chunk / parts_, part = chunk % parts_, fours = (model_.experts + 3) / 4;
    const int first = group * kRouted, last = std::min(first + kRouted, rows.count());
    float *own = member.routing;
    for (int at = first; at < last; ++at) {
      normalise(step_.x + int64_t(rows.row(0, at)) * model_.hidden, layer.mlp_norm, model_.hidden, model_.eps, own);
      for (int expert = fours * part / parts_ * 4; expert < fours * (part + 1) / parts_ * 4; expert += 4) {
        Floats sum[4] = {};
        const float *weights = layer.router + int64_t(expert) * model_.hidden;
        for (int k = 0; k < model_.hidden; k += kLanes)
          for (int i = 0; i < 4; ++i)
            sum[i].add(Floats::load(own + k), Floats::load(weights + int64_t(i) * model_.hidden + k));
        const FourFloats four = totals(sum);
        std::memcpy(scores_of(at) + expert, &four, sizeof four);
      }
    }
    if (scored_[group].fetch_add(1) + 1 < parts_) return;
    scored_[group] = 0;
    for (int at = first; at < last; ++at) {
      layer.correction ? choose_corrected(scores_of(at), layer.correction, at, own) : choose(scores_of(at), at);
      if (model_.ranks && !is_dense(phase.layer)) std::memset(added(rows.row(0, at)), 0, model_.hidden * sizeof(float));
    }
    if (routed_.fetch_add(1) + 1 == groups_of(rows)) arrange(rows, number);
  }

  float *scores_of(int row) const { return scores_ + row * packed_width(model_.experts); }

  // Finds the places of the `some` highest of values, the first of several that are equal, each once whatever they are.
  static void find_highest(const float *value, int count, int32_t *found, int some) {
    for (int j = 0; j < some; ++j) {
      int best = -1;
      for (int i = 0; i < count; ++i)
        if ((best < 0 || value[i] > value[best]) && std::find(found, found + j, i) == found + j) best = i;
      found[j] = best;
    }
  }

  static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

  // Picks the best experts of a row, and gives each its weight.
  void choose(const float *score, int row) {
    const int count = model_.experts, some = model_.per_token;
    int32_t *pick = picks_.data() + int64_t(row) * some;
    float *share = shares_.data() + places() + int64_t(row) * some;
    find_highest(score, count, pick, some);
    if (model_.sigmoid) {
      for (int j = 0; j < some; ++j) share[j] = sigmoid(score[pick[j]]) * model_.scaling;
      return;
    }
    for (int j = 0; j < some; ++j) share[j] = std::exp(score[pick[j]] - score[pick[0]]);
    float total = 0;
    if (model_.normalised)
      for (int j = 0; j < some; ++j) total += share[j];
    else
      for (int expert = 0; expert < count; ++expert) total += std::exp(score[expert] - score[pick[0]]);
    for (int j = 0; j < some; ++j) share[j] /= total;
  }

  // The same where sigmoids and a correction choose, among the experts of the best groups (DeepSeek-V3).
  void choose_corrected(float *score, const float *correction, int row, float *wanted) {
    const int count = model_.experts, some = model_.per_token, groups = model_.groups, size = count / groups;
    float *best = wanted + packed_width(count);
    for (int expert = 0; expert < count; ++expert) {
      score[expert] = sigmoid(score[expert]);
      wanted[expert] = score[expert] + correction[expert];
    }
    if (model_.groups_used < groups) {
      for (int group = 0; group < groups; ++group) {
        int32_t two[2];
        find_highest(wanted + group * size, size, two, 2);
        best[group] = wanted[group * size + two[0]] + wanted[group * size + two[1]];
      }
      std::vector<int32_t> all(groups);
      find_highest(best, groups, all.data(), groups);
      for (int j = model_.groups_used; j < groups; ++j) std::fill_n(wanted + all[j] * size, size, -INFINITY);
    }
    int32_t *pick = picks_.data() + int64_t(row) * some;
    float *share = shares_.data() + places() + int64_t(row) * some;
    find_highest(wanted, count, pick, some);
    float total = 1;
    if (model_.normalised) {
      total = 1e-20f;
      for (int j = 0; j < some; ++j) total += score[pick[j]];
    }
    for (int j = 0; j < some; ++j) share[j] = score[pick[j]] / total * model_.scaling;
  }

  // Sorts what rows have chosen by expert, and counts the chunks of the phases behind `number`. What other processes
  // compute is left out: which of them has a row is said by its position alone, so that its sum over all is the same
  // whatever it is computed with.
  void arrange(const Rows &rows, int number) {
    routed_ = 0, blocks_ = 0;
    experts_.clear();
    const int layer = phases_[number].layer, all = rows.count() * model_.per_token;
    const ExpertPlace *held = model_.layer[layer].places;
    auto is_own = [&](int at) {
      const ExpertPlace &own = held[picks_[at]];
      return own.number >= 0 &&
             (own.copies == 1 || step_.position[rows.row(0, at / model_.per_token)] % own.copies == own.turn);
    };
    std::vector<int> counts(model_.experts), next(model_.experts);
    for (int at = 0; at < all; ++at) {
      ++model_.expert_rows[int64_t(layer) * model_.experts + picks_[at]];
      if (is_own(at)) ++counts[picks_[at]];
    }
    for (int expert = 0, begin = 0; expert < model_.experts; ++expert) {
      const int some = counts[expert];
      if (!some) continue;
      next[expert] = begin;
      experts_.push_back({held[expert].number, Rows(some, rows_.data(), model_.head.kind, begin)});
      begin += some, blocks_ += experts_.back().rows.all_blocks();
    }
    for (int at = 0; at < all; ++at) {
      if (!is_own(at)) continue;
      const int place = next[picks_[at]]++;
      rows_[place] = rows.row(0, at / model_.per_token);
      shares_[place] = shares_[places() + at];
    }
    for (int at = number + 1; at < int(phases_.size()) && phases_[at].layer == layer; ++at) {
      const Phase &phase = phases_[at];
      int &chunks = chunks_[at - computed_];
      if (!is_routed(phase.product)) continue;
      if (phase.job == PACK_ROWS) chunks = shared_ && !is_packed(phase.product) ? blocks_ : 0;
      if (phase.job == MULTIPLY && phase.product == EXPERT_GATE_UP) chunks = int(experts_.size()) * chunks_of(phase);
    }
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

  // Whether adapters may add something to a product.
  bool adapts(Product product) const { return step_.adapter && product >= QKV && product <= QUERY; }

  AdapterParts parts_of(const Phase &phase, int number) const {
    return AdapterParts(step_.adapter[rows_of(phase).row(0, number)], phase.layer, phase.product - QKV);
  }

  // Multiplies a row with one of the thin matrices of its adapter.
  void shrink_row(const Phase &phase, int number, int which, Member &member) {
    const AdapterParts parts = parts_of(phase, number);
    if (which >= parts.count) return;
    const int64_t row = rows_of(phase).row(0, number);
    int in = model_.hidden;
    const float *x = member.room;
    if (phase.product == OUTPUT)
      in = narrow(), x = mixed_ + row * in;
    else if (phase.product == DOWN)
      in = model_.layer[phase.layer].down.inputs, x = inner_ + int64_t(number) * in;
    else if (phase.product == QUERY)
      in = model_.query_rank, normalise(qkv_ + row * wide(), norm_of(phase), in, model_.latent_eps, member.room);
    else
      normalise(step_.x + row * in, norm_of(phase), in, model_.eps, member.room);
    float *to = shrunk_ + int64_t(number) * step_.thin;
    parts.kind == FLOAT32 ? shrink<float>(parts.first[which], in, x, to)
                          : shrink<uint16_t>(parts.first[which], in, x, to);
  }

  // What adapters add to results of a product: row by row.
  struct Expansion {
    const Pass &pass;
    const Phase &phase;
    int number = -1;
    AdapterParts parts;
    void add(int row, int panel, Floats &sum) {
      if (row != number) parts = pass.parts_of(phase, number = row);
      if (!parts.count) return;
      const float *shrunk = pass.shrunk_ + int64_t(number) * pass.step_.thin;
      parts.kind == FLOAT32 ? expand<float>(parts, panel, shrunk, sum) : expand<uint16_t>(parts, panel, shrunk, sum);
    }
  };

  // Packs one block of the rows that are multiplied.
  void pack_rows(const Phase &phase, float *x, int number) {
    if (!is_routed(phase.product)) return pack_rows(phase, rows_of(phase), x, number);
    const Expert *expert = experts_.data();
    for (int blocks; number >= (blocks = expert->rows.all_blocks()); ++expert) number -= blocks;
    pack_rows(phase, expert->rows, x, number);
  }

  void pack_rows(const Phase &phase, const Rows &rows, float *x, int number) {
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
      case DOWN:
      case EXPERT_DOWN: {
        const int in = is_routed(phase.product) ? model_.expert_intermediate : model_.layer[phase.layer].down.inputs;
        const float *inner = inner_of(phase.product);
        return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
          return Floats::load(inner + int64_t(rows.number(slab, first + r)) * in + k);
        });
      }
      default: {
        const bool query = phase.product == QUERY;
        const int in = query ? model_.query_rank : model_.hidden, apart = query ? wide() : model_.hidden;
        const float *source = query ? qkv_ : step_.x, *weight = norm_of(phase);
        const float eps = query ? model_.latent_eps : model_.eps;
        const float *from[kMostRows];
        float factor[kMostRows];
        for (int r = 0; r < size; ++r) {
          from[r] = source + int64_t(rows.row(slab, first + r)) * apart;
          factor[r] = norm_factor(from[r], in, eps);
        }
        if (phase.product == EXPERT_GATE_UP && model_.weighs_inputs) {
          const float *share = shares_.data() + rows.number(slab, first);
          return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
            return Floats::load(from[r] + k) * factor[r] * Floats::load(weight + k) * share[r];
          });
        }
        return pack_block(model_.head.kind, size, in, packed(in), [&](int r, int k) {
          return Floats::load(from[r] + k) * factor[r] * Floats::load(weight + k);
        });
      }
    }
  }

  void multiply(const Phase &phase, const Linear &matrix, const Rows &rows, int slab, int first, Member &member) {
    const Blocks &blocks = rows.blocks(slab);
    const int width = (is_gated(phase.product) ? matrix.outputs / 2 : matrix.outputs) / kLanes,
              count = std::min(width - first, phase.size);
    float *const inner = inner_of(phase.product);
    const float *packed = is_packed(phase.product) ? inner : member.x,
                *x = packed + rows.number(slab, 0) * packed_width(matrix.inputs);
    const bool adapted = adapts(phase.product);
    Expansion expansion{*this, phase};
    auto each = [&](auto take) {
      if (!adapted) return product(matrix, first, count, x, blocks, member.room, member.sums, take);
      product(matrix, first, count, x, blocks, member.room, member.sums, [&](int row, int panel, Floats sum) {
        expansion.add(rows.number(slab, row), panel, sum);
        take(row, panel, sum);
      });
    };
    switch (phase.product) {
      case QKV:
        return each([&](int row, int panel, Floats sum) {
          sum.store(qkv_ + int64_t(rows.number(slab, row)) * wide() + panel * kLanes);
        });
      case QUERY:
        return each([&](int row, int panel, Floats sum) {
          sum.store(queries_ + int64_t(rows.number(slab, row)) * query_width() + panel * kLanes);
        });
      case GATE_UP:
      case EXPERT_GATE_UP: {
        float *ups = member.sums + int64_t(blocks.rows) * kGang * kLanes;
        penstock::multiply(matrix, width + first, count, x, blocks, member.room, ups);
        auto gated = [&](int row, int panel, const Floats &gate) {
          Floats up =
              finished(matrix, width + panel, Floats::load(ups + (int64_t(row) * kGang + panel - first) * kLanes));
          if (adapted) expansion.add(rows.number(slab, row), width + panel, up);
          return silu(gate) * up;
        };
        const int wide = width * kLanes;
        if (!packed_)
          return each([&](int row, int panel, Floats gate) {
            gated(row, panel, gate).store(inner + int64_t(rows.number(slab, row)) * wide + panel * kLanes);
          });
        PackedRow to[kSlab];
        for (int block = 0; block < blocks.count; ++block) {
          const int begin = blocks.first(block), size = blocks.size(block);
          float *packed = inner + int64_t(rows.number(slab, begin)) * packed_width(wide);
          for (int r = 0; r < size; ++r) to[begin + r] = PackedRow(packed, size, r);
        }
        return each(
            [&](int row, int panel, Floats gate) { to[row].put(panel * kLanes, wide, gated(row, panel, gate)); });
      }
      case HEAD:
        return each([&](int row, int panel, Floats sum) {
          const int at = panel * kLanes, some = std::min(model_.vocab - at, kLanes);
          if (some > 0)
            std::memcpy(step_.logits + int64_t(rows.number(slab, row)) * model_.vocab + at, &sum, some * sizeof(float));
        });
      default:
        const bool routed = is_routed(phase.product), fresh = model_.ranks && !routed;
        const bool weighed = routed && !model_.weighs_inputs;
        float *const base = added(0);
        return each([&](int row, int panel, Floats sum) {
          if (weighed) sum *= shares_[rows.number(slab, row)];
          float *to = base + int64_t(rows.row(slab, row)) * model_.hidden + panel * kLanes;
          (fresh ? sum : Floats::load(to) + sum).store(to);
        });
    }
  }

  // The weights with which rows of the residual stream are normalised before a product.
  const float *norm_of(const Phase &phase) const {
    if (phase.product == HEAD) return model_.norm;
    const Layer &layer = model_.layer[phase.layer];
    if (phase.product == QUERY) return layer.query_norm;
    return phase.product == QKV ? layer.input_norm : layer.mlp_norm;
  }

  const Linear &matrix_of(const Phase &phase) const {
    if (phase.product == HEAD) return model_.head;
    const Layer &layer = model_.layer[phase.layer];
    switch (phase.product) {
      case QKV: return layer.qkv;
      case QUERY: return layer.query;
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
  float *const qkv_, *const mixed_;           // [rows, wide()], [rows, narrow()]
  float *const queries_;                      // [rows, query_width()], or `qkv_`
  float *const asked_, *const attended_;      // what attention reads and writes: [rows, heads, head_dim], or the above
  float *const inner_, *const expert_inner_;  // [rows, intermediate], [places(), expert_intermediate]
  std::vector<int32_t> picks_, rows_;         // experts by row; rows by expert
  std::vector<float> shares_;                 // the weights in the order of `rows_`, then of `picks_`
  std::vector<Expert> experts_;               // those that rows of this layer have chosen
  int blocks_ = 0;                            // of all of them
  float *const scores_;                       // [rows, experts]
  const int parts_;                           // of the experts, whose scores are chunks of their own
  std::vector<std::atomic<int>> scored_;      // parts that a group of rows has the scores of
  std::atomic<int> routed_ = 0;               // groups of rows of this layer
  float *const shrunk_;                       // [rows, ranks]: rows in the middle of their adapters' products
  Attention attention_;
  std::vector<Member> members_;
  std::vector<Phase> phases_;
  std::vector<int> chunks_;  // of the phases from `computed_` on
  int computed_ = 0;         // phases
  int tap_ = 0;              // taps that have their phases
  bool lost_ = false;        // another rank is
};

}  // namespace

bool forward(Team *team, const Model &model, const Step &step) { return Pass(team, model, step).run(); }

}  // namespace penstock
