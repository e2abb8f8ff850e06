// What adapters add to products: each row has one of its own, or none.
#pragma once
#include "kernels.h"
#include "lanes.h"

#include <cstddef>

namespace penstock {

constexpr int kAdapted = 5;       // products of a layer to which adapters add something
constexpr int kAdapterParts = 3;  // most parts of one of them
constexpr int kTotals = 4;        // ranks at once, of which each part has a multiple

// The parts of a layer's product, which is numbered from 0.
struct AdapterParts {
  AdapterParts() = default;
  AdapterParts(const Adapter *adapter, int layer, int product)
      : first(adapter ? adapter->part + adapter->begin[layer * kAdapted + product] : nullptr),
        count(adapter ? adapter->begin[layer * kAdapted + product + 1] - adapter->begin[layer * kAdapted + product]
                      : 0),
        kind(adapter ? adapter->kind : int(FLOAT32)) {}
  const AdapterPart *first = nullptr;
  int count = 0, kind = FLOAT32;
};

// Multiplies a row of `in` inputs with the first matrix of a part.
template <class Number> void shrink(const AdapterPart &part, int in, const float *x, float *to) {
  const Number *down = static_cast<const Number *>(part.down);
  for (int r = 0; r < part.rank; r += kTotals, down += int64_t(kTotals) * in) {
    Floats sum[kTotals] = {};
    for (int k = 0; k < in; k += kLanes) {
      const Floats value = Floats::load(x + k);
      for (int i = 0; i < kTotals; ++i) sum[i].add(value, Floats::load(down + int64_t(i) * in + k));
    }
    const FourFloats four = totals(sum);
    std::memcpy(to + part.at + r, &four, sizeof four);
  }
}

// Adds to `sum` what the second matrices make of a row of shrunk numbers, in one panel of the product.
template <class Number> void expand(const AdapterParts &parts, int panel, const float *shrunk, Floats &sum) {
  for (int i = 0; i < parts.count; ++i) {
    const AdapterPart &part = parts.first[i];
    if (panel < part.first || panel >= part.first + part.panels) continue;
    const Number *up = static_cast<const Number *>(part.up) + int64_t(panel - part.first) * part.rank * kLanes;
    Floats other[kTotals] = {};  // several, as each addition waits for the one before
    for (int r = 0; r < part.rank; r += kTotals)
      for (int j = 0; j < kTotals; ++j) other[j].add(Floats::load(up + (r + j) * kLanes), shrunk[part.at + r + j]);
    sum += (other[0] + other[1]) + (other[2] + other[3]);
  }
}

}  // namespace penstock
