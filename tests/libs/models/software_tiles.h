// AMX in software, to be included before a source that uses it: what the instructions do, for machines without them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig soft_loadconfig
#define _tile_release soft_release
#define _tile_loadd soft_loadd
#define _tile_stored soft_stored
#define _tile_zero soft_zero
#define _tile_dpbf16ps soft_dpbf16ps

struct SoftConfig {
  std::uint8_t palette, start, reserved[14];
  std::uint16_t bytes[16];
  std::uint8_t rows[16];
};

static thread_local SoftConfig soft_config;
static thread_local std::uint32_t soft_tiles[8][16][16];

static void soft_loadconfig(const void *config) { std::memcpy(&soft_config, config, sizeof soft_config); }
static void soft_release() { std::memset(&soft_config, 0, sizeof soft_config); }

static void soft_zero(int tile) { std::memset(soft_tiles[tile], 0, sizeof soft_tiles[tile]); }

static void soft_loadd(int tile, const void *from, long stride) {
  soft_zero(tile);
  for (int row = 0; row < soft_config.rows[tile]; ++row) {
    std::memcpy(soft_tiles[tile][row], static_cast<const char *>(from) + row * stride, soft_config.bytes[tile]);
  }
}

static void soft_stored(int tile, void *to, long stride) {
  for (int row = 0; row < soft_config.rows[tile]; ++row) {
    std::memcpy(static_cast<char *>(to) + row * stride, soft_tiles[tile][row], soft_config.bytes[tile]);
  }
}

static float soft_half(std::uint32_t pair, int which) {
  const std::uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static void soft_dpbf16ps(int out, int a, int b) {
  for (int row = 0; row < soft_config.rows[out]; ++row) {
    for (int column = 0; column < soft_config.bytes[out] / 4; ++column) {
      float sum;
      std::memcpy(&sum, &soft_tiles[out][row][column], sizeof sum);
      for (int k = 0; k < soft_config.bytes[a] / 4; ++k) {
        for (int which = 0; which < 2; ++which) {
          sum += soft_half(soft_tiles[a][row][k], which) * soft_half(soft_tiles[b][k][column], which);
        }
      }
      std::memcpy(&soft_tiles[out][row][column], &sum, sizeof sum);
    }
  }
}
