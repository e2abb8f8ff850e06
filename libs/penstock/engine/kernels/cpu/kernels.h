// What Python and the C++ files agree on. Plain C, so that no version of torch is compiled in.
#pragma once
#include <cstdint>

namespace penstock {

// How the numbers of a packed matrix are kept. See pack.py and lossless.py for the layouts.
enum Kind : int32_t { F32 = 0, BF16 = 1, INT8 = 2, LOSSLESS = 3 };

struct Linear {
  int32_t kind;
  int32_t in;   // even
  int32_t out;  // a multiple of 16; columns beyond the model's own are zero
  int32_t unused;
  const void *data;
  const float *scale;    // [out], of INT8
  const float *bias;     // [out] or null
  const int64_t *start;  // [out / 16], of LOSSLESS: where each panel begins in `data`
  const uint8_t *parts;  // [2, 16], of LOSSLESS: the palette's upper and lower bits
};

struct Layer {
  const float *input_norm;            // [hidden]
  const float *qk_norm;               // [heads + kv_heads, head_dim] or null
  const float *mlp_norm;              // [hidden]
  Linear qkv, output, gate_up, down;  // gate_up: all columns of gate, then those of up
  int32_t window;                     // tokens that a row looks at, itself included; 0: all
  int32_t unused;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  float eps;
  float scale;          // of products of queries and keys
  int32_t kv_kind;      // F32, BF16, or INT8: see int8_kv.py
  int32_t block_size;   // tokens of a page
  int32_t vocab;        // the head's columns that are wanted
  const float *cosine;  // [positions, head_dim], see layers/rope.py
  const float *sine;    // with the sign of the first half turned
  const float *norm;    // [hidden]
  const Layer *layer;   // [layers]
  Linear head;
  const void *table;   // [vocab, hidden], what `ids` stand for; null: a step's `x` is given
  int32_t table_kind;  // F32 or BF16
  void *pool;  // [pages, layers, 2, block_size, kv_heads, head_dim]; INT8: with kv_heads scales after each token
};

// A few rows of some sequences; the rows of one sequence are neighbours and stand at consecutive positions.
struct Step {
  int32_t rows, sequences, samples, unused;
  const int32_t *first;     // [sequences + 1] row numbers
  const int32_t *position;  // [rows]
  const int32_t *table;     // page numbers, one sequence's after the other's
  const int32_t *table_at;  // [sequences]
  const int32_t *sampled;   // [samples] row numbers
  const int32_t *ids;       // [rows] tokens
  float *x;                 // [rows, hidden]: embeddings, unless the model has a table; overwritten
  float *logits;            // [samples, vocab]
  int32_t *best;            // [samples] the most probable tokens, of several the first; null: nobody asks
};

// The threads of one engine; the caller is one of them.
//
// A job is a row of phases, each cut into chunks. Whoever is there takes the next chunk, and a phase begins when the
// one before is done (one without chunks is done at once); so a member that the system doesn't schedule holds up
// nobody, unless it stops within a chunk.
struct Team;
Team *team_new(int threads);
void team_free(Team *team);
int team_size(const Team *team);
using Work = void (*)(void *context, int phase, int chunk, int member);
void team_run(Team *team, int phases, const int *chunks, Work work, void *context);  // returns when all is done

void forward(Team *team, const Model &model, const Step &step);
void linear(Team *team, const Linear &matrix, const float *x, int rows, float *out);

// bfloat16 panels [panels, pairs, 32] into the lossless format: the exponents that occur; how long each panel gets with
// a palette, `index` being a number below 16 or 255 for each exponent; the panels.
void count_exponents(const uint16_t *words, int64_t count, int64_t *counts);
void lossless_sizes(const uint16_t *words, int panels, int pairs, const uint8_t *index, int64_t *sizes);
void compress(const uint16_t *words, int panels, int pairs, const uint8_t *index, const int64_t *start, uint8_t *out);
void unpack(Team *team, const Linear &matrix, int from, int to, float *out);  // panels, as floats

}  // namespace penstock
