// The functions that Python calls.
#include "thin.h"

using namespace penstock;

extern "C" {

Team *penstock_open(int threads) { return team_new(threads); }
void penstock_close(Team *team) { team_free(team); }
void penstock_forward(Team *team, const Model *model, const Step *step) { forward(team, *model, *step); }
void penstock_linear(Team *team, const Linear *matrix, const float *x, int rows, float *out) {
  linear(team, *matrix, x, rows, out);
}
void penstock_unpack(Team *team, const Linear *matrix, int from, int to, float *out) {
  unpack(team, *matrix, from, to, out);
}

}
