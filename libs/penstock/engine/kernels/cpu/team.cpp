#include "kernels.h"

#include <atomic>
#include <thread>
#include <vector>

namespace penstock {

namespace {

constexpr int kSpins = 2000;  // in this time the next phase begins, or in a busy engine the next step

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The state of the current phase in one word, so that one addition takes a chunk: a number that tells phases apart, the
// phase's number of chunks, and the next chunk to take.
struct Ticket {
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (1u << kBits) - 1;
  uint64_t word;
  uint64_t phase() const { return word >> (2 * kBits); }
  int chunks() const { return int(word >> kBits & kMask); }
  int next() const { return int(word & kMask); }
  bool open() const { return next() < chunks(); }
  static uint64_t of(uint64_t phase, int chunks) { return phase << (2 * kBits) | uint64_t(chunks) << kBits; }
};

}  // namespace

struct Team {
  explicit Team(int threads) : size(threads) {
    for (int member = 1; member < size; ++member) others.emplace_back([this, member] { serve(member); });
  }

  ~Team() {
    leaving = true;
    call();
    for (auto &thread : others) thread.join();
  }

  void run(int count, const int *sizes, Work job, void *with) {
    work = job, context = with, phases = count, chunks = sizes, first = Ticket{ticket.load()}.phase() + 1;
    const uint64_t end = (first + count) & kPhases;
    begin(0);
    for (int spins = 0;;) {
      if (take(0)) {
        spins = 0;
      } else if (Ticket{ticket.load(std::memory_order_acquire)}.phase() == end) {
        return;
      } else if (++spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();  // the member with the last chunk may be waiting for this core
      }
    }
  }

 private:
  static constexpr uint64_t kPhases = (1u << 24) - 1;

  void call() {
    calls.fetch_add(1, std::memory_order_acq_rel);
    calls.notify_all();
  }

  void serve(int member) {
    for (int spins = 0;;) {
      const uint32_t heard = calls.load(std::memory_order_acquire);
      if (leaving) return;
      if (take(member))
        spins = 0;
      else if (++spins < kSpins)
        pause();
      else
        sleep(heard), spins = 0;
    }
  }

  // Waits for the next call. Either the member that opens a phase sees the sleeper, or the sleeper sees the phase.
  void sleep(uint32_t heard) {
    asleep.fetch_add(1);
    if (!Ticket{ticket.load()}.open()) calls.wait(heard);
    asleep.fetch_sub(1);
  }

  // Does one chunk of the current phase; returns false when none is left. It reads the job's fields only after it has
  // taken a chunk: from then on they do not change until the chunk is done.
  bool take(int member) {
    if (!Ticket{ticket.load(std::memory_order_acquire)}.open()) return false;
    const Ticket mine{ticket.fetch_add(1, std::memory_order_acq_rel)};
    if (!mine.open()) return false;
    const int phase = int((mine.phase() - first) & kPhases);
    work(context, phase, mine.next(), member);
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) begin(phase + 1);
    return true;
  }

  // Opens the next phase that has chunks, or reports that all are done.
  void begin(int phase) {
    while (phase < phases && chunks[phase] == 0) ++phase;
    const int count = phase < phases ? chunks[phase] : 0;
    left.store(count, std::memory_order_relaxed);
    ticket.store(Ticket::of((first + phase) & kPhases, count));
    if (count && asleep.load()) call();
  }

 public:
  const int size;

 private:
  Work work = nullptr;
  void *context = nullptr;
  int phases = 0;
  const int *chunks = nullptr;
  uint64_t first = 0;
  std::atomic<bool> leaving = false;
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int> left{0};
  alignas(64) std::atomic<uint32_t> calls{0};
  std::atomic<int> asleep{0};
  std::vector<std::thread> others;
};

Team *team_new(int threads) { return new Team(threads < 1 ? 1 : threads); }
void team_free(Team *team) { delete team; }
int team_size(const Team *team) { return team->size; }
void team_run(Team *team, int phases, const int *chunks, Work work, void *context) {
  team->run(phases, chunks, work, context);
}

}  // namespace penstock
