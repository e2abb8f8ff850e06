// Measures how fast memory can be read: that limits every step which has to read all weights.

#include "layout.h"

#include <chrono>
#include <thread>
#include <vector>

namespace penstock {

namespace {

constexpr int kWords = 16;  // two cache lines

// Adds up 64-bit words, reading at several places at once.
template <int kPlaces> uint64_t sum(const uint64_t *words, int64_t count) {
  const int64_t each = count / kPlaces;
  uint64_t sums[kPlaces][kWords] = {};
  for (int64_t at = 0; at + kWords <= each; at += kWords)
    for (int place = 0; place < kPlaces; ++place)
      for (int word = 0; word < kWords; ++word) sums[place][word] += words[place * each + at + word];
  uint64_t total = 0;
  for (const auto &place : sums)
    for (uint64_t one : place) total += one;
  return total;
}

}  // namespace

// Returns the seconds that reading `bytes` at `data` once takes. Each thread reads its own part, in one run or in four
// at once: which is faster depends on the processor. The sum of the words goes to `total`, so that no read can be left
// out.
extern "C" double penstock_read(const void *data, int64_t bytes, int32_t threads, int32_t places, uint64_t *total) {
  const auto *words = static_cast<const uint64_t *>(data);
  const int64_t each = bytes / 8 / threads;
  const auto part = places == 1 ? sum<1> : sum<4>;
  std::vector<uint64_t> sums(threads);
  std::vector<std::thread> others;
  const auto begin = std::chrono::steady_clock::now();
  for (int32_t number = 1; number < threads; ++number)
    others.emplace_back([=, &sums] { sums[number] = part(words + number * each, each); });
  sums[0] = part(words, each);
  for (std::thread &one : others) one.join();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  *total = 0;
  for (uint64_t one : sums) *total += one;
  return taken.count();
}

}  // namespace penstock
