#include "meeting.h"

#include "lanes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace penstock {

namespace {

constexpr int kSpins = 4000;    // in this time others come that compute as fast
constexpr int kYields = 20000;  // then others may want this core; then they take so long that sleep does no harm
constexpr auto kNap = std::chrono::microseconds(100);
constexpr auto kPatience = std::chrono::seconds(60);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool Meeting::meet() {
  ++ranks_.turn;
  at<uint64_t>(1 + ranks_.rank).store(ranks_.turn, std::memory_order_release);
  for (int rank = 0; rank < ranks_.ranks; ++rank)
    if (!wait(rank)) return false;
  return true;
}

bool Meeting::wait(int rank) const {
  const auto &there = at<uint64_t>(1 + rank);
  for (int spins = 0; there.load(std::memory_order_acquire) < ranks_.turn; ++spins) {
    if (spins < kSpins) {
      pause();
      continue;
    }
    if (at<uint32_t>(0).load(std::memory_order_relaxed)) return false;
    if (spins < kSpins + kYields) {
      std::this_thread::yield();
    } else {
      if (std::chrono::microseconds(kNap) * (spins - kSpins - kYields) > kPatience) return false;
      std::this_thread::sleep_for(kNap);
    }
  }
  return true;
}

void Meeting::add(int64_t from, int64_t count, float *to) const {
  for (int64_t i = 0; i < count; i += kLanes) {
    if (count - i < kLanes) {
      for (; i < count; ++i)
        for (int rank = 0; rank < ranks_.ranks; ++rank) to[i] += place(rank, false)[from + i];
      return;
    }
    Floats sum = Floats::load(to + i);
    for (int rank = 0; rank < ranks_.ranks; ++rank) sum += Floats::load(place(rank, false) + from + i);
    sum.store(to + i);
  }
}

extern "C" {

// Returns 0 when a rank is lost.
int penstock_meet(Ranks *ranks) { return Meeting(*ranks).meet(); }

// Makes `own` the sum over all ranks; returns 0 when one is lost.
int penstock_add(Ranks *ranks, float *own, int64_t count) {
  Meeting meeting(*ranks);
  for (int64_t first = 0; first < count; first += ranks->room) {
    const int64_t some = std::min(count - first, ranks->room);
    std::memcpy(meeting.own(), own + first, some * sizeof(float));
    if (!meeting.meet()) return 0;
    std::memset(own + first, 0, some * sizeof(float));
    meeting.add(0, some, own + first);
  }
  return 1;
}
}

}  // namespace penstock
