// Products of packed rows and panels, 16 rows and 16 columns at a time. A panel of bfloat16 is a run of tiles.
#pragma once
#include "amx.h"
#include "panels.h"
#include "products.h"

#include <algorithm>

namespace penstock {

constexpr int kSumsApart = kGang * kLanes * 4;  // bytes between the sums of one row and of the next

// How the tiles are used. With two blocks of rows, tiles 0 and 1 hold their sums for one panel, tiles 2 and 3 those for
// another; a single block has its sums in all four. Tile 4 holds rows, and tile 5 those of a second block. The other
// tiles hold weights.
inline void shape_for(TileShapes &shapes, int rows) {
  const uint8_t r = uint8_t(rows);
  shapes.set({r, r, r, r, r, 16, 16, 16});
}
inline void shape_for(TileShapes &shapes, int rows, int others) {
  const uint8_t r = uint8_t(rows), o = uint8_t(others);
  shapes.set({r, o, r, o, r, o, 16, 16});
}

// The address of a block of rows, and of its sums.
struct TileRows {
  const char *x;  // tile after tile, each with `count` rows of 64 bytes
  int count;
  float *sums;
};

// Makes a tile from the weights of up to 32 inputs of a panel, with zeros behind the last.
template <Kind kind> inline void fill_tile(Reader<kind> &from, int inputs, char *tile) {
  from.enter();
  int k = 0;
  if constexpr (kind == LOSSLESS)
    if (inputs == kTileInputs && !from.verbatim) return from.whole(tile);
  for (; k < inputs; k += 2) {
    from.ahead();
    from.next().store(tile + k * 32);
  }
  std::memset(tile + k * 32, 0, kTileBytes - k * 32);
}

// Reads the weights of P panels, tile by tile, straight from memory.
template <int P> struct Lying {
  const char *panel[P];

  inline void enter(int tile) {  // prefetches what is read a little later
    for (int p = 0; p < P; ++p)
      for (int line = 0; line < kTileBytes; line += 64) __builtin_prefetch(at(p, tile + 4) + line);
  }
  inline const char *at(int p, int tile) const { return panel[p] + int64_t(tile) * kTileBytes; }
};

// The same for panels that are in a cache already and serve several blocks of rows, in `steps` steps. The prefetches of
// the panels `next`, `lines` of each, are spread over these steps.
template <int P> struct Staying {
  const char *panel[P];
  const char *next[P];  // or null
  int64_t steps, lines, step = 0;

  inline void enter(int) {
    const int64_t begin = step * lines / steps, end = ++step * lines / steps;
    for (int p = 0; p < P; ++p)
      if (next[p])
        for (int64_t line = begin; line < end; ++line) __builtin_prefetch(next[p] + line * 64, 0, 2);
  }
  inline const char *at(int p, int tile) const { return panel[p] + int64_t(tile) * kTileBytes; }
};

// The same for panels that have been made into tiles already. The next P panels are made into tiles meanwhile, so that
// the processor does both at once.
template <Kind kind, int P> struct Making {
  const char *panel[P];
  Reader<kind> next[P];
  char *to[P];
  int inputs;
  int64_t steps, tiles;  // steps with these panels, and tiles of the next ones
  int64_t step = 0, made = 0;

  inline void enter(int) {
    ++step;
    while (made * steps < step * tiles) make();
  }
  inline void make() {
    const int p = int(made % P), at = int(made / P) * kTileInputs;
    fill_tile(next[p], std::min(inputs - at, kTileInputs), to[p] + int64_t(at) * 32);
    ++made;
  }
  inline const char *at(int p, int tile) const { return panel[p] + int64_t(tile) * kTileBytes; }
};

// The same for panels that have to be made into tiles first. This is done one tile ahead of the products, so that the
// processor does both at once.
template <Kind kind, int P> class Restored {
 public:
  Restored(const Linear &matrix, int panel) : left_(matrix.inputs) {
    for (int p = 0; p < P; ++p) reader_[p] = Reader<kind>(matrix, panel + p, 0);
    enter(-1);
  }
  inline void enter(int tile) {
    const int inputs = left_ < kTileInputs ? left_ : kTileInputs;
    if (inputs == 0) return;
    for (int p = 0; p < P; ++p) fill_tile(reader_[p], inputs, tile_[(tile + 1) & 1][p]);
    left_ -= inputs;
  }
  inline const char *at(int p, int tile) const { return tile_[tile & 1][p]; }

 private:
  Reader<kind> reader_[P];
  int left_;  // inputs that have not been made into tiles yet
  alignas(64) char tile_[2][P][kTileBytes];
};

// Adds `tiles` times 32 inputs to the sums of one block of rows and P panels; P is 1, 2 or 4.
template <int P, class Weights> void add_tiles(Weights &weights, int tiles, const TileRows &rows, bool fresh) {
  if (fresh) {
    tile_zero<0>();
    if constexpr (P > 1) tile_zero<1>();
    if constexpr (P > 2) tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(rows.sums, kSumsApart);
    if constexpr (P > 1) tile_load<1>(rows.sums + kLanes, kSumsApart);
    if constexpr (P > 2)
      tile_load<2>(rows.sums + 2 * kLanes, kSumsApart), tile_load<3>(rows.sums + 3 * kLanes, kSumsApart);
  }
  for (int t = 0; t < tiles; ++t) {
    weights.enter(t);
    tile_load<4>(rows.x + int64_t(t) * rows.count * 64, 64);
    tile_load<6>(weights.at(0, t), 64);
    tile_add<0, 4, 6>();
    if constexpr (P > 1) {
      tile_load<7>(weights.at(1, t), 64);
      tile_add<1, 4, 7>();
    }
    if constexpr (P > 2) {
      tile_load<5>(weights.at(2, t), 64);
      tile_add<2, 4, 5>();
      tile_load<6>(weights.at(3, t), 64);
      tile_add<3, 4, 6>();
    }
  }
  tile_store<0>(rows.sums, kSumsApart);
  if constexpr (P > 1) tile_store<1>(rows.sums + kLanes, kSumsApart);
  if constexpr (P > 2)
    tile_store<2>(rows.sums + 2 * kLanes, kSumsApart), tile_store<3>(rows.sums + 3 * kLanes, kSumsApart);
}

// The same for two blocks of rows and one or two panels: every loaded tile of weights is used twice.
template <int P, class Weights>
void add_tiles(Weights &weights, int tiles, const TileRows &one, const TileRows &other, bool fresh) {
  if (fresh) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (P > 1) tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(one.sums, kSumsApart), tile_load<1>(other.sums, kSumsApart);
    if constexpr (P > 1) tile_load<2>(one.sums + kLanes, kSumsApart), tile_load<3>(other.sums + kLanes, kSumsApart);
  }
  for (int t = 0; t < tiles; ++t) {
    weights.enter(t);
    tile_load<4>(one.x + int64_t(t) * one.count * 64, 64);
    tile_load<6>(weights.at(0, t), 64);
    tile_add<0, 4, 6>();
    tile_load<5>(other.x + int64_t(t) * other.count * 64, 64);
    tile_add<1, 5, 6>();
    if constexpr (P > 1) {
      tile_load<7>(weights.at(1, t), 64);
      tile_add<2, 4, 7>();
      tile_add<3, 5, 7>();
    }
  }
  tile_store<0>(one.sums, kSumsApart), tile_store<1>(other.sums, kSumsApart);
  if constexpr (P > 1) tile_store<2>(one.sums + kLanes, kSumsApart), tile_store<3>(other.sums + kLanes, kSumsApart);
}

// Multiplies one or two blocks of rows: weights are read once, and the tiles hold the sums over all inputs.
template <Kind kind, int P, class... Rows> void multiply_few(const Linear &matrix, int panel, const Rows &...rows) {
  const int tiles = (matrix.inputs + kTileInputs - 1) / kTileInputs;
  if (kind == BFLOAT16 && matrix.inputs % kTileInputs == 0) {
    Lying<P> weights;
    for (int p = 0; p < P; ++p) weights.panel[p] = Reader<kind>(matrix, panel + p, 0).at;
    add_tiles<P>(weights, tiles, rows..., true);
  } else {
    Restored<kind, P> weights(matrix, panel);
    add_tiles<P>(weights, tiles, rows..., true);
  }
}

// Multiplies more rows: all of them with the inputs [from, from + kStretch) of P panels, which are number `p` and
// following of `count` from panel `first` on. Panels that have to be made into tiles are made one call ahead.
template <Kind kind, int P>
void multiply_many(const Linear &matrix, int first, int p, int count, int from, const float *x, const Blocks &blocks,
                   float *room, float *sums, TileShapes &shapes) {
  const int inputs = std::min(matrix.inputs - from, kStretch), tiles = (inputs + kTileInputs - 1) / kTileInputs;
  const int64_t steps = int64_t(blocks.count + 1) / 2 * tiles;
  const int panel = first + p;
  const bool more = P > 1 && p + 2 * P <= count;  // whether as many panels follow
  auto rows = [&](int block) {
    const int row = blocks.first(block), size = blocks.size(block);
    return TileRows{reinterpret_cast<const char *>(x + row * packed_width(matrix.inputs)) + int64_t(from) * size * 2,
                    size, sums + (int64_t(row) * kGang + p) * kLanes};
  };
  auto multiply = [&](auto &weights) {
    for (int block = 0; block < blocks.count; block += 2) {
      if (block + 1 < blocks.count) {
        shape_for(shapes, blocks.size(block), blocks.size(block + 1));
        add_tiles<P>(weights, tiles, rows(block), rows(block + 1), from == 0);
      } else {
        shape_for(shapes, blocks.size(block));
        add_tiles<P>(weights, tiles, rows(block), from == 0);
      }
    }
  };
  if (kind == BFLOAT16 && inputs % kTileInputs == 0) {
    Staying<P> weights{{}, {}, steps, int64_t(tiles) * kTileBytes / 64};
    for (int i = 0; i < P; ++i) {
      weights.panel[i] = Reader<kind>(matrix, panel + i, from).at;
      if (more) weights.next[i] = Reader<kind>(matrix, panel + P + i, from).at;
    }
    return multiply(weights);
  }
  auto place = [&](int turn, int i) {
    return reinterpret_cast<char *>(room) + int64_t(turn % 2 * P + i) * kStretch * 32;
  };
  Making<kind, P> weights{{}, {}, {}, inputs, steps, int64_t(P) * tiles};
  auto begin = [&](int turn) {
    for (int i = 0; i < P; ++i) {
      weights.next[i] = Reader<kind>(matrix, first + turn * P + i, from);
      weights.to[i] = place(turn, i);
    }
  };
  const int turn = p / P;
  if (turn == 0 || P == 1) {
    begin(turn);
    while (weights.made < weights.tiles) weights.make();
    weights.made = 0;
  }
  for (int i = 0; i < P; ++i) weights.panel[i] = place(turn, i);
  if (more)
    begin(turn + 1);
  else
    weights.tiles = 0;
  multiply(weights);
}

template <Kind kind>
void multiply_tiles(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room,
                    float *sums) {
  TileShapes shapes;
  auto rows = [&](int block, int p) {
    const int row = blocks.first(block);
    return TileRows{reinterpret_cast<const char *>(x + row * packed_width(matrix.inputs)), blocks.size(block),
                    sums + (int64_t(row) * kGang + p) * kLanes};
  };
  int p = 0;
  if (blocks.count == 1) {
    shape_for(shapes, blocks.rows);
    for (; p + 4 <= count; p += 4) multiply_few<kind, 4>(matrix, panel + p, rows(0, p));
    for (; p < count; ++p) multiply_few<kind, 1>(matrix, panel + p, rows(0, p));
  } else if (blocks.count == 2) {
    shape_for(shapes, blocks.size(0), blocks.size(1));
    for (; p + 2 <= count; p += 2) multiply_few<kind, 2>(matrix, panel + p, rows(0, p), rows(1, p));
    if (p < count) multiply_few<kind, 1>(matrix, panel + p, rows(0, p), rows(1, p));
  } else {
    for (int from = 0; from < matrix.inputs; from += kStretch) {
      for (p = 0; p + 2 <= count; p += 2)
        multiply_many<kind, 2>(matrix, panel, p, count, from, x, blocks, room, sums, shapes);
      if (p < count) multiply_many<kind, 1>(matrix, panel, p, count, from, x, blocks, room, sums, shapes);
    }
  }
}

// The same for INT4: a tile is a group of each column, and its products are multiplied by the group's scales before
// they are added to the sums.
inline void multiply_groups(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks,
                            float *room, float *sums) {
  static_assert(kTileInputs == kGroup);
  TileShapes shapes;
  auto *const made = reinterpret_cast<char *>(room);
  Floats scale[kStretch / kTileInputs];
  alignas(64) float products[kTileRows][kLanes];
  for (int p = 0; p < count; ++p)
    for (int from = 0; from < matrix.inputs; from += kStretch) {
      const int inputs = std::min(matrix.inputs - from, kStretch), tiles = (inputs + kTileInputs - 1) / kTileInputs;
      Reader<INT4> reader(matrix, panel + p, from);
      for (int t = 0; t < tiles; ++t) {
        fill_tile(reader, std::min(inputs - t * kTileInputs, kTileInputs), made + t * kTileBytes);
        scale[t] = reader.scale;
      }
      for (int block = 0; block < blocks.count; ++block) {
        const int first = blocks.first(block), size = blocks.size(block);
        const char *rows =
            reinterpret_cast<const char *>(x + first * packed_width(matrix.inputs)) + int64_t(from) * size * 2;
        shape_for(shapes, size);
        for (int t = 0; t < tiles; ++t) {
          tile_zero<0>();
          tile_load<4>(rows + int64_t(t) * size * 64, 64);
          tile_load<6>(made + t * kTileBytes, 64);
          tile_add<0, 4, 6>();
          tile_store<0>(products, 64);
          for (int r = 0; r < size; ++r) {
            float *to = sums + (int64_t(first + r) * kGang + p) * kLanes;
            Floats sum = from + t == 0 ? Floats{} : Floats::load(to);
            sum.add(Floats::load(products[r]), scale[t]);
            sum.store(to);
          }
        }
      }
    }
}

}  // namespace penstock
