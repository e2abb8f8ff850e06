// Memory for the intermediate results of one call, which is reused by the next call.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace penstock {

class Scratch {
 public:
  // Uninitialised memory, aligned to a cache line. It is valid until this thread makes another Scratch.
  float *floats(int64_t count) {
    static thread_local std::vector<Room> rooms;
    if (next_ == rooms.size()) rooms.emplace_back();
    Room &room = rooms[next_++];
    if (room.size < count) {
      room.size = (count + count / 4 + 15) / 16 * 16;
      room.at.reset(static_cast<float *>(std::aligned_alloc(64, size_t(room.size) * sizeof(float))));
      if (!room.at) throw std::bad_alloc();
    }
    return room.at.get();
  }

 private:
  struct Free {
    void operator()(float *at) const { std::free(at); }
  };
  struct Room {
    std::unique_ptr<float, Free> at;
    int64_t size = 0;
  };
  size_t next_ = 0;
};

}  // namespace penstock
