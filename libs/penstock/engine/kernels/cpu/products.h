// Products of rows with packed matrices.
#pragma once
#include "kernels.h"
#include "lanes.h"

#include <cstddef>

namespace penstock {

constexpr int kGang = kTiles ? 16 : 8;                           // most panels in one call of `multiply`
constexpr int kSums = kWidth == 16 ? 24 : kWidth == 8 ? 10 : 8;  // registers for sums; the others hold weights
constexpr int kRows = kSums / (kWidth == 16 ? 2 : kParts);       // rows whose sums fit into these
constexpr int kTileRows = 16;                                    // rows of a tile, see amx.h
constexpr int kExpandFrom = 64;            // rows from which unpacking a panel once pays, unless it is compressed
constexpr int kInputs = 576;               // inputs whose unpacked panels stay in the nearer caches
constexpr int kStretch = 2048;             // inputs of two panels, as tiles, that do so beside a slab of rows
constexpr int kSlab = kTiles ? 512 : 120;  // most rows in one call of `multiply`

// Whether rows are rounded to bfloat16 before they are multiplied with a matrix of this kind: if the processor
// multiplies bfloat16 and the weights are exact in it. Sums are float32, as everywhere.
constexpr bool rounds(int kind) { return kProducts && kind != FLOAT32; }

// How rows are cut into blocks of as many rows as are multiplied at once.
struct Blocks {
  Blocks(int rows, int kind) : Blocks(rows, rounds(kind) && kTiles ? kTileRows : kRows, nullptr) {}
  int first(int block) const { return int(int64_t(rows) * block / count); }
  int size(int block) const { return first(block + 1) - first(block); }
  int rows, count;

 private:
  Blocks(int rows, int most, std::nullptr_t) : rows(rows), count((rows + most - 1) / most) {}
};
constexpr int kMostRows = kTiles ? kTileRows : kRows;  // most rows of a block

// How many floats a packed row takes.
inline int64_t packed_width(int in) { return (in + 31) / 32 * 32; }

// A row that is packed for tiles, in which 32 inputs of one row in bfloat16 follow those of the row before.
struct PackedRow {
  uint16_t *at;
  int64_t apart;  // from 32 inputs to the next 32
  PackedRow() = default;
  // Row r of a block of `size` rows that is packed at `block`.
  PackedRow(float *block, int size, int r) : at(reinterpret_cast<uint16_t *>(block) + r * 32), apart(size * 32) {}
  // Writes the inputs [k, k + 16) of `in`; behind the last of all, zeros to the tile's end.
  inline void put(int k, int in, const Floats &value) const {
    uint16_t *to = at + k / 32 * apart + k % 32;
    value.round(to);
    if (k % 32 == 0 && k + kLanes >= in) Floats{}.round(to + kLanes);
  }
};

// Packs one block of rows for matrices of a kind. `value(r, k)` gives sixteen inputs of row r, zeros behind the last.
// The result is one of these:
// - floats, out[k * size + r];
// - pairs of bfloat16, out[k / 2 * size + r];
// - rows for tiles, see PackedRow.
template <class Value> void pack_block(int kind, int size, int in, float *out, Value value) {
  float lanes[kMostRows][kLanes];
  for (int k = 0; k < in; k += kLanes) {
    const int some = in - k < kLanes ? in - k : kLanes;
    if (!rounds(kind)) {
      for (int r = 0; r < size; ++r) value(r, k).store(lanes[r]);
      for (int i = 0; i < some; ++i)
        for (int r = 0; r < size; ++r) *out++ = lanes[r][i];
    } else if (!kTiles) {
      for (int r = 0; r < size; ++r) value(r, k).round(reinterpret_cast<uint16_t *>(lanes[r]));
      for (int i = 0; i < some / 2; ++i)
        for (int r = 0; r < size; ++r) *out++ = lanes[r][i];
    } else {
      for (int r = 0; r < size; ++r) PackedRow(out, size, r).put(k, in, value(r, k));
    }
  }
}

// Computes the sums for `count` panels (at most kGang) from `panel` on, into sums[row][gang]. Each sum adds the inputs
// in the same order, whatever the other rows and panels are. `room` has kRoom floats.
void multiply(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room,
              float *sums);

constexpr int kRoom = kGang * kInputs * kLanes;

// Applies scale and bias to a finished sum.
inline Floats finished(const Linear &matrix, int panel, Floats sum) {
  if (matrix.kind == INT8) sum *= Floats::load(matrix.scale + panel * kLanes);
  if (matrix.bias) sum += Floats::load(matrix.bias + panel * kLanes);
  return sum;
}

// Calls `multiply`, then take(row, panel, result) for each result.
template <class Take>
void product(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room, float *sums,
             Take take) {
  multiply(matrix, panel, count, x, blocks, room, sums);
  for (int row = 0; row < blocks.rows; ++row)
    for (int p = 0; p < count; ++p)
      take(row, panel + p, finished(matrix, panel + p, Floats::load(sums + (int64_t(row) * kGang + p) * kLanes)));
}

}  // namespace penstock
