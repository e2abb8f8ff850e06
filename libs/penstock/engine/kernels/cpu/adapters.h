// What adapters add to products: each row has one of its own, or none.
#pragma once
#include "kernels.h"
#include "lanes.h"

#include <cstddef>

namespace penstock {

constexpr int kAdapted = 4;       // products of a layer to which adapters add something
constexpr int kAdapterParts = 3;  // most parts of one of them

// The parts of a layer's product, which is numbered from 0.
struct AdapterParts {
  AdapterParts(const Adapter *adapter, int layer, int product)
      : first(adapter ? adapter->part + adapter->begin[layer * kAdapted + product] : nullptr),
        count(adapter ? adapter->begin[layer * kAdapted + product + 1] - adapter->begin[layer * kAdapted + product]
                      : 0),
        kind(adapter ? adapter->kind : int(FLOAT32)) {}
  const AdapterPart *first;
  int count, kind;
};

// Multiplies a row of `in` inputs with the first matrix of a part. `value(k)` gives sixteen of them.
template <class Number, class Value> void shrink(const AdapterPart &part, int in, Value value, float *to) {
  constexpr int kAtOnce = 8;
  const Number *down = static_cast<const Number *>(part.down);
  for (int r = 0; r < part.rank; r += kAtOnce, down += int64_t(kAtOnce) * in) {
    Floats sum[kAtOnce] = {};
    for (int k = 0; k < in; k += kLanes) {
      const Floats x = value(k);
      for (int i = 0; i < kAtOnce; ++i) sum[i].add(x, Floats::load(down + int64_t(i) * in + k));
    }
    for (int i = 0; i < kAtOnce; ++i) to[part.at + r + i] = sum[i].total();
  }
}

// What the second matrices make of a row of shrunk numbers, in one panel of the product.
template <class Number> Floats expand(const AdapterParts &parts, int panel, const float *shrunk) {
  Floats sum{};
  for (int i = 0; i < parts.count; ++i) {
    const AdapterPart &part = parts.first[i];
    if (panel < part.first || panel >= part.first + part.panels) continue;
    const Number *up = static_cast<const Number *>(part.up) + int64_t(panel - part.first) * part.rank * kLanes;
    Floats other{};
    for (int r = 0; r < part.rank; r += 2) {
      sum.add(Floats::load(up + r * kLanes), shrunk[part.at + r]);
      other.add(Floats::load(up + (r + 1) * kLanes), shrunk[part.at + r + 1]);
    }
    sum += other;
  }
  return sum;
}

}  // namespace penstock
