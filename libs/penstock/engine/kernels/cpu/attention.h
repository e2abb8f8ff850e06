// Attention of a few rows over the pages where their keys and values are.
#pragma once
#include "thin.h"

namespace penstock {

// One step's queries, keys and values of one layer.
struct Attention {
  const Model &model;
  const Step &step;
  int layer;
  float *qkv;    // [rows][(heads + 2 kv_heads) head_dim]: turned in place
  float *mixed;  // [rows][heads head_dim]
  int longest;   // tokens of the longest context, rounded up to whole vectors
};

// Floats that `attend` needs for itself.
int64_t attention_room(const Model &model, int longest);

// One sequence's rows in the heads that share key head `kv_head`: stores their keys and values in the pages, then mixes.
void attend(const Attention &work, int sequence, int kv_head, float *room);

// x / rms(x) * weight
void normalise(const float *x, const float *weight, int size, float eps, float *out);
float norm_factor(const float *x, int size, float eps);

}  // namespace penstock
