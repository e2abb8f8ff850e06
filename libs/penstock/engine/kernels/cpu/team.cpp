// A fixed team of threads that runs one job at a time. Members that wait spin for a moment, since the next phase of a
// step is microseconds away, and then sleep, since six processes may share two cores.
#include "thin.h"

#include <atomic>
#include <thread>
#include <vector>

namespace penstock {

namespace {

constexpr int kSpins = 4000;

void wait_for_change(const std::atomic<uint32_t> &word, uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

struct Team {
  explicit Team(int threads) : size(threads) {
    for (int member = 1; member < size; ++member) others.emplace_back([this, member] { serve(member); });
  }

  ~Team() {
    leaving = true;
    start();
    for (auto &thread : others) thread.join();
  }

  void start() {
    turn.fetch_add(1, std::memory_order_acq_rel);
    turn.notify_all();
  }

  void serve(int member) {
    for (uint32_t seen = 0;; ++seen) {
      wait_for_change(turn, seen);
      if (leaving) return;
      job(context, member);
      meet();
    }
  }

  void meet() {
    if (size == 1) return;
    const uint32_t round = rounds.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      rounds.store(round + 1, std::memory_order_release);
      rounds.notify_all();
    } else {
      wait_for_change(rounds, round);
    }
  }

  const int size;
  Job job = nullptr;
  void *context = nullptr;
  bool leaving = false;
  std::atomic<uint32_t> turn{0}, rounds{0};
  std::atomic<int> arrived{0};
  std::vector<std::thread> others;
};

Team *team_new(int threads) { return new Team(threads < 1 ? 1 : threads); }
void team_free(Team *team) { delete team; }
int team_size(const Team *team) { return team->size; }

void team_run(Team *team, Job job, void *context) {
  team->job = job;
  team->context = context;
  team->start();
  job(context, 0);
  team->meet();
}

void team_meet(Team *team, int) { team->meet(); }

}  // namespace penstock
