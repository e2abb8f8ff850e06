// The functions that Python calls.
#include "attention.h"
#include "products.h"

namespace penstock {

extern "C" {

uint64_t penstock_layout() { return kLayout; }

Team *penstock_open(int threads) { return team_new(threads); }
int penstock_rounds(int kind) { return rounds(kind); }
void penstock_close(Team *team) { team_free(team); }
int penstock_forward(Team *team, const Model *model, const Step *step) { return forward(team, *model, *step); }
void penstock_attend(Team *team, const Model *model, const Step *step, const float *qkv, float *mixed) {
  attend(team, *model, *step, qkv, mixed);
}
void penstock_linear(Team *team, const Linear *matrix, const float *x, int rows, float *out) {
  linear(team, *matrix, x, rows, out);
}
void penstock_unpack(Team *team, const Linear *matrix, int from, int to, float *out) {
  unpack(team, *matrix, from, to, out);
}

void penstock_count_exponents(const uint16_t *words, int64_t count, int64_t *counts) {
  count_exponents(words, count, counts);
}
void penstock_lossless_sizes(const uint16_t *words, int panels, int pairs, const uint8_t *index, int64_t *sizes) {
  lossless_sizes(words, panels, pairs, index, sizes);
}
void penstock_compress(const uint16_t *words, int panels, int pairs, const uint8_t *index, const int64_t *start,
                       uint8_t *out) {
  compress(words, panels, pairs, index, start, out);
}
}

}  // namespace penstock
