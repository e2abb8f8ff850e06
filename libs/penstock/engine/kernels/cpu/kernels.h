// What the C++ files share. What they share with Python is in layout.h, which layout.py writes for each build. No
// header of torch or Python is included, so one build serves every version of both.
#pragma once
#include "layout.h"

namespace penstock {

// The threads of one engine; the caller is one of them.
//
// A job is a series of phases, each cut into chunks. A member that has nothing to do takes the next chunk, and a phase
// begins when the one before it is done (a phase without chunks is done at once). So a member that the system does not
// schedule delays the others only if it was stopped in the middle of a chunk.
Team *team_new(int threads);
void team_free(Team *team);
int team_size(const Team *team);
using Work = void (*)(void *context, int phase, int chunk, int member);
void team_run(Team *team, int phases, const int *chunks, Work work, void *context);  // returns when all is done

bool forward(Team *team, const Model &model, const Step &step);  // false: a rank is lost
void linear(Team *team, const Linear &matrix, const float *x, int rows, float *out);

// Brings bfloat16 panels [panels, pairs, 32] into the lossless format, in three calls: count the exponents; find how
// long each panel becomes with a palette, in which `index` gives each exponent a number below 16, or 255; write the
// panels.
void count_exponents(const uint16_t *words, int64_t count, int64_t *counts);
void lossless_sizes(const uint16_t *words, int panels, int pairs, const uint8_t *index, int64_t *sizes);
void compress(const uint16_t *words, int panels, int pairs, const uint8_t *index, const int64_t *start, uint8_t *out);
void unpack(Team *team, const Linear &matrix, int from, int to, float *out);  // panels [from, to) as floats

}  // namespace penstock
