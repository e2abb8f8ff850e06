// Sums over processes, in memory that they share.
#pragma once
#include "kernels.h"

#include <atomic>

namespace penstock {

// The processes that compute a model together, from the side of one of them. They meet again and again: before a
// meeting each writes what it brings to a place of its own, behind it each reads what all have brought. There are two
// places for each, used in turn: who writes to one again has met the others since, and these were through with reading
// by then.
//
// The memory begins with a line that is not zero when a process is lost, and a line for each with the number of its
// last meeting; then come the places.
class Meeting {
 public:
  explicit Meeting(Ranks &ranks) : ranks_(ranks) {}
  // The place of a rank in the meeting that comes, or, behind it, in the one that was.
  float *place(int rank, bool next) const {
    const uint64_t turn = ranks_.turn + next;
    return reinterpret_cast<float *>(static_cast<char *>(ranks_.memory) + kLine * (1 + ranks_.ranks)) +
           ((turn & 1) * ranks_.ranks + rank) * ranks_.room;
  }
  float *own() const { return place(ranks_.rank, true); }
  // Returns when all are there; false when one is lost, or has not come in time.
  bool meet();
  // Adds what all have brought to `to`.
  void add(int64_t from, int64_t count, float *to) const;

 private:
  static constexpr int64_t kLine = 64;
  template <class T> std::atomic<T> &at(int line) const {
    return *reinterpret_cast<std::atomic<T> *>(static_cast<char *>(ranks_.memory) + kLine * line);
  }
  bool wait(int rank) const;

  Ranks &ranks_;
};

}  // namespace penstock
