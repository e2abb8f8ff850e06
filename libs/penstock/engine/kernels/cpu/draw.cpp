// Chooses tokens: of those that are legal, the most probable one; or of those that min-p, top-k and top-p leave of
// them, the one that wins with Gumbel noise. What is chosen is that of engine/sampling/sampler.py, whose docstring says
// in which order what applies.
#include "lanes.h"
#include "layout.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace penstock {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
constexpr int kChunk = 256;
constexpr int32_t kHigh = 1 << 24, kRare = 1 << 14;
constexpr float kNear = 1e-3f;
constexpr float kReach = 4.0f;  // below the highest, in which a cut is looked for first
constexpr int kSorted = 64;

inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// The noise of a token, as engine/sampling/noise.py has it.
inline float gumbel(uint64_t stream, int token) {
  const uint64_t bits = mix(stream + (uint64_t(token) + 1) * kGamma);
  const double uniform = (double(bits >> 11) + 0.5) * 0x1p-53;
  return float(-std::log(-std::log(uniform)));
}

// The logarithm of a positive normal number, in a form of which the compiler makes vectors: an exponent, and the series
// 2 artanh((m - 1) / (m + 1)) of what is left, between the roots of 1/2 and 2. Within 1e-6 of the logarithm, and of its
// 1e-6th near 1.
inline float near_log(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float m = std::bit_cast<float>(bits - exponent * (1 << 23));
  const float z = (m - 1.0f) / (m + 1.0f), s = z * z;
  return float(exponent) * 0.693147181f + z * (2.0f + s * (0.666666667f + s * (0.4f + s * 0.285714286f)));
}

// Noise within kNear of a token's, from the 24 upper bits of what it is made of, unless these are `rare`.
inline float near_gumbel(int32_t high) { return -near_log(-near_log((float(high) + 0.5f) * 0x1p-24f)); }
inline bool rare(int32_t high) { return uint32_t(high - kRare) >= uint32_t(kHigh - 2 * kRare); }

// e to the power of x, which is not positive, within a millionth.
inline float near_exp(float x) {
  const float turns = (x > -80.0f ? x : -80.0f) * 1.44269504f;
  const int32_t whole = int32_t(turns - 0.5f);
  const float f = (turns - float(whole)) * 0.693147181f;  // between minus and plus ln(2) / 2
  const float power = 1 + f * (1 + f * (0.5f + f * (1 / 6.0f + f * (1 / 24.0f + f * (1 / 120.0f + f * (1 / 720.0f))))));
  return power * std::bit_cast<float>((whole + 127) << 23);
}

// Room for one row.
struct Room {
  std::vector<float> scaled, near;
  std::vector<int32_t> high;

  explicit Room(int vocab) : scaled(vocab), near(vocab), high(vocab) {}
};

float highest(const float *values, int count) {
  const int whole = count / kLanes * kLanes;
  Floats most = Floats::all(kNone);
  for (int i = 0; i < whole; i += kLanes) most.most(Floats::load(values + i));
  float found = most.highest();
  for (int i = whole; i < count; ++i) found = std::max(found, values[i]);
  return found;
}

bool finite_or_out(const float *logits, int vocab) {
  int wrong = 0;
  for (int i = 0; i < vocab; ++i) wrong |= !(logits[i] < std::numeric_limits<float>::infinity());
  return !wrong;
}

// What the values from `floor` on weigh together, beside the highest.
double weight(const float *values, int count, float most, float floor) {
  double total = 0;
  float weights[kChunk];
  for (int first = 0; first < count; first += kChunk) {
    const int some = std::min(kChunk, count - first);
    // in two loops, so that the compiler makes vectors of both
    for (int i = 0; i < some; ++i) weights[i] = near_exp(values[first + i] - most);
    for (int i = 0; i < some; ++i) weights[i] = values[first + i] >= floor ? weights[i] : 0.0f;
    std::fill(weights + some, weights + kChunk, 0.0f);
    Floats sum = Floats::load(weights);
    for (int i = kLanes; i < kChunk; i += kLanes) sum += Floats::load(weights + i);
    total += sum.total();
  }
  return total;
}

// Copies the values from `floor` on; returns their number.
int gather(const float *values, int count, float floor, float *to) {
  int found = 0;
  for (int i = 0; i < count; ++i) {
    to[found] = values[i];
    found += values[i] >= floor;
  }
  return found;
}

// The value at which the highest ones weigh `limit` together. Changes the order of the values.
float least_of_weight(float *values, int count, float most, double limit) {
  double before = 0;
  while (count > kSorted) {
    const int half = count / 2;
    std::nth_element(values, values + half, values + count, std::greater<>());
    const double own = weight(values, half, most, kNone);
    if (before + own >= limit) {
      count = half;
    } else {
      before += own, values += half, count -= half;
    }
  }
  std::sort(values, values + count, std::greater<>());
  float least = values[0];
  for (int i = 0; i < count && (!i || before < limit); ++i) least = values[i], before += near_exp(least - most);
  return least;
}

// The least value that min-p, then top-k, then top-p of the k leave. `top_k` 0 is off. `some` has room for all values.
float least_left(const float *values, int vocab, float most, int top_k, float top_p, float min_p, float *some) {
  float floor = std::numeric_limits<float>::lowest();
  if (min_p > 0) floor = most + std::log(min_p);
  if (!top_k && top_p >= 1) return floor;
  double limit = top_k ? 0 : top_p * weight(values, vocab, most, floor);
  for (float reach = kReach;; reach *= 2) {
    const float bar = std::max(floor, most - reach);
    int count = gather(values, vocab, bar, some);
    if (bar > floor && (top_k ? count < top_k : weight(some, count, most, bar) < limit)) continue;
    if (top_k && top_k < count) {
      std::nth_element(some, some + top_k - 1, some + count, std::greater<>());
      count = top_k;
    }
    if (top_p >= 1) return *std::min_element(some, some + count);
    if (top_k) limit = top_p * weight(some, count, most, bar);
    return least_of_weight(some, count, most, limit);
  }
}

// The token that wins with noise of those from `floor` on, the first where several do. Where these are many, what is
// near the noise is computed for all, and the noise itself for those that may win.
int winner(Room &room, int vocab, float floor, uint64_t stream) {
  const float *scaled = room.scaled.data();
  float *near = room.near.data();
  int32_t *high = room.high.data();
  int left = 0;
  for (int i = 0; i < vocab; ++i) left += scaled[i] >= floor;
  const bool few = left < vocab / 16;
  float bar = kNone;
  if (!few) {
    for (int first = 0; first < vocab; first += kChunk) {
      const int end = std::min(first + kChunk, vocab);
      for (int i = first; i < end; ++i) high[i] = int32_t(mix(stream + (uint64_t(i) + 1) * kGamma) >> 40);
      for (int i = first; i < end; ++i) near[i] = scaled[i] + near_gumbel(high[i]);
      for (int i = first; i < end; ++i) near[i] = (scaled[i] >= floor) & !rare(high[i]) ? near[i] : kNone;
    }
    const float most = highest(near, vocab);
    bar = most - 2 * kNear - std::abs(most) * 1e-6f;
  }
  int best = 0;
  float best_noisy = kNone;
  for (int i = 0; i < vocab; ++i) {
    if (!(scaled[i] >= floor) || !(few || near[i] >= bar || rare(high[i]))) continue;
    if (const float noisy = scaled[i] + gumbel(stream, i); noisy > best_noisy) best = i, best_noisy = noisy;
  }
  return best;
}

// What is not legal can't be chosen: a bit of the mask for each value.
void take_out(float *values, int count, const int32_t *mask) {
  for (int first = 0; first < count; first += 32) {
    const uint32_t bits = uint32_t(mask[first / 32]);
    if (bits == ~0u) continue;
    const int end = std::min(32, count - first);
    for (int i = 0; i < end; ++i) values[first + i] = (bits >> i) & 1 ? values[first + i] : kNone;
  }
}

}  // namespace

extern "C" {

// A token for each row of `logits` [rows, vocab], which the kernel does not change: `numbers` has its temperature (0:
// greedy), top_p and min_p, `top_k` 0 where that is off, and `masks` its legal tokens, bit by bit, or null where all
// are. -1 where a logit is infinite or no number, or none that is legal is finite; minus infinity is a token that can't
// be chosen.
void penstock_draw(const float *logits, int32_t rows, int32_t vocab, const float *numbers, const int32_t *top_k,
                   const uint64_t *streams, const int32_t *const *masks, int32_t *tokens) {
  Room room(vocab);
  float *scaled = room.scaled.data();
  for (int row = 0; row < rows; ++row, logits += vocab, numbers += 3) {
    tokens[row] = -1;
    if (!finite_or_out(logits, vocab)) continue;
    const float temperature = numbers[0];
    if (temperature == 0) {
      std::copy(logits, logits + vocab, scaled);
    } else {
      for (int i = 0; i < vocab; ++i) scaled[i] = logits[i] / temperature;
    }
    if (masks[row]) take_out(scaled, vocab, masks[row]);
    const float most = highest(scaled, vocab);
    if (most == kNone) continue;
    if (temperature == 0) {
      tokens[row] = int32_t(std::find(scaled, scaled + vocab, most) - scaled);
      continue;
    }
    const int k = top_k[row] < vocab ? top_k[row] : 0;
    const float floor = least_left(scaled, vocab, most, k, numbers[1], numbers[2], room.near.data());
    tokens[row] = winner(room, vocab, floor, streams[row]);
  }
}
}

}  // namespace penstock
