// The processor's tiles (AMX): eight registers of 16 rows of 64 bytes, and products of bfloat16 with sums in float32.
//
// A row of a product does not depend on the other rows, nor a column on the other columns, and inputs are added
// in the same order whatever else is in the tile. So results keep their bits however many rows are computed together.
#pragma once
#include "lanes.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace penstock {

constexpr int kTileInputs = 32;  // inputs in one row of a tile
constexpr int kTileBytes = 1024;

// The instructions, in assembly: the compiler's own functions do not declare that they read and write memory.
template <int tile> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(tile)); }
template <int tile> inline void tile_load(const void *at, int64_t apart) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(at), "r"(apart) : "memory");
}
template <int tile> inline void tile_store(void *at, int64_t apart) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(at), "r"(apart) : "memory");
}
// sums += rows * weights
template <int sums, int rows, int weights> inline void tile_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights));
}

// While this object lives, each of the eight tiles has the given number of rows of 64 bytes.
class TileShapes {
 public:
  ~TileShapes() { asm volatile("tilerelease"); }
  void set(const std::array<uint8_t, 8> &rows) {
    if (std::memcmp(rows.data(), config_.rows, rows.size()) == 0) return;
    std::memcpy(config_.rows, rows.data(), rows.size());
    asm volatile("ldtilecfg %0" : : "m"(config_));
  }

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };
  Config config_;
};

}  // namespace penstock
