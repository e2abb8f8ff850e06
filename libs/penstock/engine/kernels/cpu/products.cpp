#include "products.h"

#include "panels.h"
#include "scratch.h"
#if defined(__AMX_BF16__)
#include "amx_products.h"
#endif

#include <algorithm>
#include <type_traits>

namespace penstock {

namespace {

// The number of panels whose sums fit into the registers, for R rows.
template <int R>
constexpr int kPanels = [] {
  const int fit = kSums / (R * kParts);
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}();

// Adds the products of R rows and P panels to `sums`. `x` is a packed block of floats, or of pairs of bfloat16. Where
// groups have scales, each group's sum is multiplied by its own.
template <class Panel, bool pairs, int R, int P>
void add(Panel *panels, int inputs, const float *x, float *sums, bool fresh) {
  // The number of panels whose weights are in registers at once. Where sums take most registers, the rows' numbers are
  // loaded one after the other.
  constexpr int together = kWidth < 16 || R < 5 ? 1 : pairs ? P : P < 2 ? P : 2;
  Floats sum[R][P], group[R][P];
  Floats(&own)[R][P] = Panel::kScaled ? group : sum;
  Panel panel[P];
  for (int p = 0; p < P; ++p) panel[p] = panels[p];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = fresh ? Floats{} : Floats::load(sums + (r * kGang + p) * kLanes);
  for (int k = 0; k < inputs;) {
    const int stop = inputs - k > Panel::kRun ? k + Panel::kRun : inputs;
    for (int p = 0; p < P; ++p) panel[p].enter();
    if constexpr (Panel::kScaled)
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) group[r][p] = {};
    while (k < stop) {
      for (int p = 0; p < P; ++p) panel[p].line();
#pragma GCC unroll 4
      for (int i = 0; i < Panel::kLine && k < stop; ++i, k += 2, x += pairs ? R : 2 * R)
        for (int first = 0; first < P; first += together) {
          Pairs weights[together];
          Floats even[together], odd[together];
          for (int p = 0; p < together; ++p) {
            if constexpr (R > 1)
              panel[first + p].ahead();  // for one row, the processor's own prefetching is fast enough
            if constexpr (pairs)
              weights[p] = panel[first + p].next();
            else
              panel[first + p].next(even[p], odd[p]);
          }
          for (int r = 0; r < R; ++r)
            for (int p = 0; p < together; ++p) {
              if constexpr (pairs)
                add_pairs(own[r][first + p], weights[p], x[r]);
              else
                own[r][first + p].add(even[p], x[r]);
            }
          if constexpr (!pairs)
            for (int r = 0; r < R; ++r)
              for (int p = 0; p < together; ++p) own[r][first + p].add(odd[p], x[R + r]);
        }
    }
    if constexpr (Panel::kScaled)
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sum[r][p].add(group[r][p], panel[p].scale);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p].store(sums + (r * kGang + p) * kLanes);
}

template <class Panel, bool pairs, int R>
void add_all(const Panel *panels, int count, int inputs, const float *x, float *sums, bool fresh) {
  int p = 0;
  for (; p + kPanels<R> <= count; p += kPanels<R>) {
    Panel some[kPanels<R>];
    for (int i = 0; i < kPanels<R>; ++i) some[i] = panels[p + i];
    add<Panel, pairs, R, kPanels<R>>(some, inputs, x, sums + p * kLanes, fresh);
  }
  for (; p < count; ++p) {
    Panel one = panels[p];
    add<Panel, pairs, R, 1>(&one, inputs, x, sums + p * kLanes, fresh);
  }
}

template <bool pairs, int R = kRows, class Panel>
void add_block(int rows, const Panel *panels, int count, int inputs, const float *x, float *sums, bool fresh) {
  if constexpr (R > 0) {
    if (rows == R) return add_all<Panel, pairs, R>(panels, count, inputs, x, sums, fresh);
    add_block<pairs, R - 1>(rows, panels, count, inputs, x, sums, fresh);
  }
}

// Unpacks a panel to floats, with an input every `stride` floats, or to what it would be in bfloat16.
template <Kind kind, bool pairs = false> void expand(Reader<kind> panel, int inputs, float *out, int stride) {
  for (int k = 0; k < inputs;) {
    const int stop = inputs - k > Reader<kind>::kRun ? k + Reader<kind>::kRun : inputs;
    panel.enter();
    for (; k < stop; k += 2, out += pairs ? kLanes : 2 * stride) {
      panel.ahead();
      if constexpr (pairs) {
        panel.next().store(out);
      } else {
        Floats even, odd;
        panel.next(even, odd);
        even.store(out);
        odd.store(out + stride);
      }
    }
  }
}

template <Kind kind>
void multiply_lanes(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room,
                    float *sums) {
  constexpr bool pairs = rounds(kind);
  constexpr Kind unpacked = pairs ? BFLOAT16 : FLOAT32;
  using Open = std::conditional_t<kind == INT4, Numbers<unpacked>, Reader<unpacked>>;
  const bool wide = kind == LOSSLESS || kind == INT4 || (pairs && kind == INT8)
                        ? blocks.count > 1
                        : kind != unpacked && blocks.rows >= kExpandFrom;
  const int most = blocks.count == 1 ? matrix.inputs : wide ? kInputs : 1536;
  for (int from = 0; from < matrix.inputs; from += most) {
    const int inputs = matrix.inputs - from < most ? matrix.inputs - from : most;
    Reader<kind> packed[kGang];
    Open open[kGang];
    for (int p = 0; p < count; ++p) {
      packed[p] = Reader<kind>(matrix, panel + p, from);
      if (!wide) continue;
      float *own = room + p * kInputs * kLanes;
      expand<kind, pairs>(packed[p], inputs, own, kLanes);
      if constexpr (kind == INT4)
        open[p] = Open(own, packed[p]);
      else
        open[p] = Open(own);
    }
    // A panel that is read as it is packed stays in the nearest cache while all blocks of rows use it.
    const int together = wide || blocks.count == 1 ? count : kPanels<kRows>;
    for (int p = 0; p < count; p += together)
      for (int block = 0; block < blocks.count; ++block) {
        const int first = blocks.first(block), rows = blocks.size(block),
                  some = count - p < together ? count - p : together;
        const float *own = x + first * packed_width(matrix.inputs) + int64_t(from) * rows / (pairs ? 2 : 1);
        float *into = sums + (int64_t(first) * kGang + p) * kLanes;
        if (wide)
          add_block<pairs>(rows, open + p, some, inputs, own, into, from == 0);
        else
          add_block<pairs>(rows, packed + p, some, inputs, own, into, from == 0);
      }
  }
}

template <Kind kind>
void multiply(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room,
              float *sums) {
#if defined(__AMX_BF16__)
  if constexpr (kind == INT4)
    return multiply_groups(matrix, panel, count, x, blocks, room, sums);
  else if constexpr (rounds(kind))
    return multiply_tiles<kind>(matrix, panel, count, x, blocks, room, sums);
  else
#endif
    return multiply_lanes<kind>(matrix, panel, count, x, blocks, room, sums);
}

// Unpacks panels to floats, side by side.
template <Kind kind> void unpack(const Linear &matrix, int panel, float *out, int stride) {
  expand<kind>(Reader<kind>(matrix, panel, 0), matrix.inputs, out, stride);
  auto scaled = [&](int k, const Floats &scale) {
    (Floats::load(out + int64_t(k) * stride) * scale).store(out + int64_t(k) * stride);
  };
  if constexpr (kind == INT8)
    for (int k = 0; k < matrix.inputs; ++k) scaled(k, Floats::load(matrix.scale + panel * kLanes));
  if constexpr (kind == INT4) {
    Reader<kind> from(matrix, panel, 0);
    for (int k = 0; k < matrix.inputs; ++k) {
      if (k % kGroup == 0) from.enter();
      scaled(k, from.scale);
    }
  }
}

// One product that a team shares: it packs the rows, then multiplies panels.
struct Product {
  const Linear &matrix;
  const float *x;
  Blocks blocks;
  float *packed;       // [rows, packed_width(in)]
  float *room, *sums;  // memory of each member
  float *out;

  void pack(int block) const {
    const int first = blocks.first(block), in = matrix.inputs;
    const float *from = x + int64_t(first) * in;
    pack_block(matrix.kind, blocks.size(block), in, packed + first * packed_width(in), [&](int r, int k) {
      Floats some = {};
      std::memcpy(&some, from + int64_t(r) * in + k, std::min(in - k, kLanes) * sizeof(float));
      return some;
    });
  }
  void panels(int chunk, int member) const {
    const int first = chunk * kGang, all = matrix.outputs / kLanes, count = all - first < kGang ? all - first : kGang;
    product(matrix, first, count, packed, blocks, room + int64_t(member) * kRoom,
            sums + int64_t(member) * blocks.rows * kGang * kLanes, [&](int row, int panel, Floats result) {
              result.store(out + int64_t(row) * matrix.outputs + panel * kLanes);
            });
  }
};

}  // namespace

void multiply(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room,
              float *sums) {
  switch (matrix.kind) {
    case FLOAT32: return multiply<FLOAT32>(matrix, panel, count, x, blocks, room, sums);
    case BFLOAT16: return multiply<BFLOAT16>(matrix, panel, count, x, blocks, room, sums);
    case INT8: return multiply<INT8>(matrix, panel, count, x, blocks, room, sums);
    case INT4: return multiply<INT4>(matrix, panel, count, x, blocks, room, sums);
    default: return multiply<LOSSLESS>(matrix, panel, count, x, blocks, room, sums);
  }
}

void linear(Team *team, const Linear &matrix, const float *x, int rows, float *out) {
  const int members = team_size(team), slab = rows < kSlab ? rows : kSlab;
  Scratch scratch;
  float *packed = scratch.floats(slab * packed_width(matrix.inputs));
  float *room = scratch.floats(int64_t(members) * kRoom);
  float *sums = scratch.floats(int64_t(members) * slab * kGang * kLanes);
  for (int row = 0; row < rows; row += slab) {
    const int count = rows - row < slab ? rows - row : slab;
    Product job{matrix, x + int64_t(row) * matrix.inputs,   Blocks(count, matrix.kind), packed, room,
                sums,   out + int64_t(row) * matrix.outputs};
    const int chunks[] = {job.blocks.count, (matrix.outputs / kLanes + kGang - 1) / kGang};
    team_run(
        team, 2, chunks,
        [](void *context, int phase, int chunk, int member) {
          const Product &job = *static_cast<const Product *>(context);
          phase ? job.panels(chunk, member) : job.pack(chunk);
        },
        &job);
  }
}

void unpack(Team *team, const Linear &matrix, int from, int to, float *out) {
  struct Piece {
    const Linear &matrix;
    int from, stride;
    float *out;
  } piece{matrix, from, (to - from) * kLanes, out};
  const int chunks[] = {to - from};
  team_run(
      team, 1, chunks,
      [](void *context, int, int chunk, int) {
        const Piece &piece = *static_cast<Piece *>(context);
        float *out = piece.out + chunk * kLanes;
        switch (piece.matrix.kind) {
          case FLOAT32: return unpack<FLOAT32>(piece.matrix, piece.from + chunk, out, piece.stride);
          case BFLOAT16: return unpack<BFLOAT16>(piece.matrix, piece.from + chunk, out, piece.stride);
          case INT8: return unpack<INT8>(piece.matrix, piece.from + chunk, out, piece.stride);
          case INT4: return unpack<INT4>(piece.matrix, piece.from + chunk, out, piece.stride);
          default: return unpack<LOSSLESS>(piece.matrix, piece.from + chunk, out, piece.stride);
        }
      },
      &piece);
}

}  // namespace penstock
