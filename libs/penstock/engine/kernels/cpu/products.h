// Products of rows with packed matrices.
#pragma once
#include "lanes.h"
#include "kernels.h"

namespace penstock {

constexpr int kGang = 8;        // panels of one call of `multiply`
constexpr int kSums = kWidth == 16 ? 24 : kWidth == 8 ? 10 : 8;  // registers for sums: the others hold weights
constexpr int kRows = kSums / (kWidth == 16 ? 2 : kParts);  // rows whose sums fit into them
constexpr int kExpandFrom = 64;  // rows from which a panel is worth turning into floats once, unless it is compressed
constexpr int kInputs = 576;    // inputs of so many panels as floats stay in the nearer caches
constexpr int kSlab = 120;      // most rows of one call

// Rows in the order in which `multiply` reads them: in blocks of up to kRows, input by input. One row is as it is.
struct Blocks {
  explicit Blocks(int rows) : rows(rows), count((rows + kRows - 1) / kRows) {}
  int first(int block) const { return int(int64_t(rows) * block / count); }
  int size(int block) const { return first(block + 1) - first(block); }
  int rows, count;
};

// Packs one block: out[k * size + r] = value(r, k).
template <class Value> void pack_block(int size, int in, float *out, Value value) {
  float lanes[kRows][kLanes];
  int k = 0;
  for (; k + kLanes <= in; k += kLanes) {
    for (int r = 0; r < size; ++r) value(r, k).store(lanes[r]);
    for (int i = 0; i < kLanes; ++i)
      for (int r = 0; r < size; ++r) *out++ = lanes[r][i];
  }
}

// The sums of `count` (at most kGang) panels from `panel` on, into sums[row][gang]. Every sum goes through the inputs
// in order, whatever the other rows and panels are. `room` has kGang * kInputs * kLanes floats.
void multiply(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room, float *sums);

constexpr int kRoom = kGang * kInputs * kLanes;

// Bias and scale of a finished sum.
inline Floats finished(const Linear &matrix, int panel, Floats sum) {
  if (matrix.kind == INT8) sum *= Floats::load(matrix.scale + panel * kLanes);
  if (matrix.bias) sum += Floats::load(matrix.bias + panel * kLanes);
  return sum;
}

// `multiply`, then take(row, panel, result) for each.
template <class Take>
void product(const Linear &matrix, int panel, int count, const float *x, const Blocks &blocks, float *room, float *sums, Take take) {
  multiply(matrix, panel, count, x, blocks, room, sums);
  for (int row = 0; row < blocks.rows; ++row)
    for (int p = 0; p < count; ++p)
      take(row, panel + p, finished(matrix, panel + p, Floats::load(sums + (int64_t(row) * kGang + p) * kLanes)));
}

}  // namespace penstock
