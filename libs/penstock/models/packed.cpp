// What training does to packed rows between its matrix products, on processors that multiply bfloat16 (AVX-512, AMX):
// causal attention within each document, norms, the gate of the feed-forward half and the loss, each with its backward
// half.
//
// TorchKernels in packed.py is the same arithmetic in torch; a test compares the two. Nothing here is summed in an
// order that depends on the number of threads, so that a resumed run computes the same bits.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Half = std::uint16_t;  // a bfloat16
using Pair = std::uint32_t;  // two of them, which are multiplied and added in one step
constexpr long kLanes = 16;  // floats in a register
constexpr long kSide = 64;   // attention goes in blocks of 64 queries and 64 keys, and a head has 64 numbers
constexpr long kPairs = kSide / 2;
constexpr long kBlock = kSide * kSide;
constexpr float kLog2E = 1.44269504f;
constexpr float kScale = 0.125f;  // 1 / sqrt(64)
constexpr float kLowest = -1e30f;
constexpr long kChunks = 64;  // parts in which sums over rows are made

long rounded(long count, long to) { return (count + to - 1) / to * to; }

__m512 wide(const Half *from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

float wide_one(Half half) {
  const Pair bits = Pair(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void narrow(Half *to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)));
}

// 2^x to within 3e-7 of itself; 0 far below.
__m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 power = _mm512_set1_ps(1.3333558e-3f);
  for (float factor : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(factor));
  }
  return _mm512_scalef_ps(power, whole);
}

// dst[column][row] = src[row][column], 16 x 16 numbers of 32 bits.
void transpose16(const Pair *src, long src_stride, Pair *dst, long dst_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(src + i * src_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(dst + i * dst_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(dst + (i + 8) * dst_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    _mm512_storeu_si512(dst + (i + 4) * dst_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
    _mm512_storeu_si512(dst + (i + 12) * dst_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
  }
}

void transpose(const Pair *src, long rows, long columns, Pair *dst) {
  for (long row = 0; row < rows; row += 16) {
    for (long column = 0; column < columns; column += 16) {
      transpose16(src + row * columns + column, columns, dst + column * rows + row, rows);
    }
  }
}

// Two rows of 16 numbers as 16 pairs, the first row's number below.
__m512i paired(__m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}

#ifdef __AMX_BF16__

// Counts of keys and of query columns are rounded up to these, as far as `product` computes at once.
constexpr long kKeyStep = 32, kColumnStep = 2;

// The tiles of one thread, while it lives: eight of 16 rows of 64 bytes.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  Tiles(const Tiles &) = delete;
  ~Tiles() { _tile_release(); }
};

// out[rows][64] = a[rows][2 pairs] b[pairs][64], of which `columns` times 16 columns are computed; added to what is
// there if `add`. All counts are multiples of 32 numbers.
void product(long columns, const Half *a, const Pair *b, float *out, long rows, long pairs, bool add) {
  constexpr long kIn = kSide * sizeof(Half), kOut = kSide * sizeof(float);
  for (long row = 0; row < rows; row += 32) {
    for (long column = 0; column < columns * kLanes; column += 32) {
      float *to = out + row * kSide + column;
      if (add) {
        _tile_loadd(0, to, kOut);
        _tile_loadd(1, to + 16, kOut);
        _tile_loadd(2, to + 16 * kSide, kOut);
        _tile_loadd(3, to + 16 * kSide + 16, kOut);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (long pair = 0; pair < pairs; pair += 16) {
        _tile_loadd(4, a + row * kSide + 2 * pair, kIn);
        _tile_loadd(5, a + (row + 16) * kSide + 2 * pair, kIn);
        _tile_loadd(6, b + pair * kSide + column, kOut);
        _tile_loadd(7, b + pair * kSide + column + 16, kOut);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, to, kOut);
      _tile_stored(1, to + 16, kOut);
      _tile_stored(2, to + 16 * kSide, kOut);
      _tile_stored(3, to + 16 * kSide + 16, kOut);
    }
  }
}

#else

constexpr long kKeyStep = 4, kColumnStep = 1;

struct Tiles {
  Tiles() {}
};

// out[rows][64] = a[rows][2 pairs] b[pairs][64], of which `kColumns` times 16 columns are computed; added to what is
// there if `add`. Rows are computed by 4 or 8, so `a` and `out` need memory for as many.
template <int kRows, int kColumns>
void product_of(const Half *a, const Pair *b, float *out, long rows, long pairs, bool add) {
  for (long row = 0; row < rows; row += kRows) {
    __m512 sums[kRows][kColumns];
    float *to = out + row * kSide;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        sums[r][c] = add ? _mm512_loadu_ps(to + r * kSide + c * kLanes) : _mm512_setzero_ps();
      }
    }
    for (long pair = 0; pair < pairs; ++pair) {
      __m512bh right[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        right[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + pair * kSide + c * kLanes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int both;
        std::memcpy(&both, a + (row + r) * kSide + 2 * pair, sizeof both);
        const __m512bh left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], left, right[c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) _mm512_storeu_ps(to + r * kSide + c * kLanes, sums[r][c]);
    }
  }
}

void product(long columns, const Half *a, const Pair *b, float *out, long rows, long pairs, bool add) {
  switch (columns) {
    case 1: return product_of<8, 1>(a, b, out, rows, pairs, add);
    case 2: return product_of<8, 2>(a, b, out, rows, pairs, add);
    case 3: return product_of<4, 3>(a, b, out, rows, pairs, add);
    default: return product_of<4, 4>(a, b, out, rows, pairs, add);
  }
}

#endif

// Memory of one thread, handed out in pieces that live as long as a task.
class Room {
 public:
  explicit Room(long bytes) {
    if (long(memory_.size()) < bytes + 64) memory_.resize(bytes + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    next_ = memory_.data() + (64 - address % 64) % 64;
  }

  template <class T> T *take(long count) {
    T *found = reinterpret_cast<T *>(next_);
    next_ += count * sizeof(T);
    return found;
  }

 private:
  static thread_local std::vector<char> memory_;
  char *next_;
};

thread_local std::vector<char> Room::memory_;

// Where one head of one document is in memory, and how its positions turn.
struct Lines {
  long count;        // tokens
  long stride;       // numbers from one token to the next
  const float *cos;  // [positions][64], of which the second half repeats the first
  const float *sin;

  long blocks() const { return (count + kSide - 1) / kSide; }
  long in_block(long block) const { return std::min(kSide, count - block * kSide); }
};

// Copies the rows of a head; the last block is filled up with zeros.
void gather(const Lines &lines, const Half *from, Half *to) {
  for (long row = 0; row < lines.count; ++row) std::memcpy(to + row * kSide, from + row * lines.stride, 2 * kSide);
  std::memset(to + lines.count * kSide, 0, 2 * kSide * (lines.blocks() * kSide - lines.count));
}

// The same, each row turned by its position.
void gather_turned(const Lines &lines, const Half *from, Half *to) {
  for (long row = 0; row < lines.count; ++row) {
    const Half *in = from + row * lines.stride;
    for (long i = 0; i < kPairs; i += kLanes) {
      const __m512 cos = _mm512_loadu_ps(lines.cos + row * kSide + i),
                   sin = _mm512_loadu_ps(lines.sin + row * kSide + i);
      const __m512 low = wide(in + i), high = wide(in + kPairs + i);
      narrow(to + row * kSide + i, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)));
      narrow(to + row * kSide + kPairs + i, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)));
    }
  }
  std::memset(to + lines.count * kSide, 0, 2 * kSide * (lines.blocks() * kSide - lines.count));
}

// Writes one row of gradients, times the scale of the scores and turned back.
void scatter_turned(const Lines &lines, const float *from, Half *to, long row) {
  const __m512 scale = _mm512_set1_ps(kScale);
  for (long i = 0; i < kPairs; i += kLanes) {
    const __m512 cos = _mm512_mul_ps(scale, _mm512_loadu_ps(lines.cos + row * kSide + i));
    const __m512 sin = _mm512_mul_ps(scale, _mm512_loadu_ps(lines.sin + row * kSide + i));
    const __m512 low = _mm512_loadu_ps(from + i), high = _mm512_loadu_ps(from + kPairs + i);
    narrow(to + row * lines.stride + i, _mm512_fmadd_ps(low, cos, _mm512_mul_ps(high, sin)));
    narrow(to + row * lines.stride + kPairs + i, _mm512_fmsub_ps(high, cos, _mm512_mul_ps(low, sin)));
  }
}

// Of each block: pairs[p][number] holds rows 2p and 2p + 1.
void pair_rows(const Half *rows, long blocks, Pair *pairs) {
  for (long p = 0; p < blocks * kPairs; ++p) {
    for (long i = 0; i < kSide; i += kLanes) {
      const __m512i both = paired(wide(rows + 2 * p * kSide + i), wide(rows + (2 * p + 1) * kSide + i));
      _mm512_storeu_si512(pairs + p * kSide + i, both);
    }
  }
}

// Of each block: pairs[p][row] holds numbers 2p and 2p + 1 of the row.
void pair_numbers(const Half *rows, long blocks, Pair *pairs) {
  for (long block = 0; block < blocks; ++block) {
    transpose(reinterpret_cast<const Pair *>(rows + block * kBlock), kSide, kPairs, pairs + block * kPairs * kSide);
  }
}

// Of each block: turned[number][row], from what pair_rows has made.
void turn_pairs(const Pair *pairs, long blocks, Half *turned) {
  for (long block = 0; block < blocks; ++block) {
    transpose(pairs + block * kPairs * kSide, kPairs, kSide, reinterpret_cast<Pair *>(turned + block * kBlock));
  }
}

// The queries of a register that may see key `key`, both counted within a block on the diagonal.
__mmask16 seen(long key, long lane) {
  if (key <= lane) return 0xffff;
  return key >= lane + kLanes ? 0 : __mmask16(0xffff << (key - lane));
}

// One head of one document. Keys go down and queries across, so that nothing is ever summed within a register.
void attend(const Lines &lines, const Half *queries, const Half *keys, const Half *values, Half *out, long out_stride,
            float *logs) {
  const Tiles tiles;
  const long blocks = lines.blocks(), size = blocks * kBlock;
  Room room(8 * size + 4 * size + 3 * 4 * kBlock);
  Half *rows = room.take<Half>(size), *k = room.take<Half>(size), *turned_values = room.take<Half>(size);
  Pair *q = room.take<Pair>(size / 2), *pairs = room.take<Pair>(size / 2);
  float *scores = room.take<float>(kBlock), *sums = room.take<float>(kBlock), *whole = room.take<float>(kBlock);
  gather(lines, values, rows);
  pair_rows(rows, blocks, pairs);
  turn_pairs(pairs, blocks, turned_values);
  gather_turned(lines, queries, rows);
  pair_numbers(rows, blocks, q);
  gather_turned(lines, keys, k);
  Pair *weights = pairs;  // of one block from here on
  const __m512 scale = _mm512_set1_ps(kScale * kLog2E);
  for (long i = 0; i < blocks; ++i) {
    const long columns = rounded(lines.in_block(i), kColumnStep * kLanes) / kLanes;
    __m512 best[4], total[4];
    for (long c = 0; c < 4; ++c) best[c] = _mm512_set1_ps(kLowest), total[c] = _mm512_setzero_ps();
    for (long j = 0; j <= i; ++j) {
      const long count = rounded(lines.in_block(j), kKeyStep);
      product(columns, k + j * kBlock, q + i * kPairs * kSide, scores, count, kPairs, false);
      for (long c = 0; c < columns; ++c) {
        float *column = scores + c * kLanes;
        __m512 high = best[c];
        for (long row = 0; row < count; ++row) {
          __m512 score = _mm512_loadu_ps(column + row * kSide);
          if (i == j) {
            score = _mm512_mask_mov_ps(_mm512_set1_ps(kLowest), seen(row, c * kLanes), score);
            _mm512_storeu_ps(column + row * kSide, score);
          }
          high = _mm512_max_ps(high, score);
        }
        const __m512 fade = exp2(_mm512_mul_ps(_mm512_sub_ps(best[c], high), scale));
        const __m512 base = _mm512_mul_ps(high, scale);
        __m512 sum = _mm512_mul_ps(total[c], fade);
        for (long row = 0; row < count; row += 2) {
          const __m512 first = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(column + row * kSide), scale, base));
          const __m512 second = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(column + (row + 1) * kSide), scale, base));
          sum = _mm512_add_ps(sum, _mm512_add_ps(first, second));
          _mm512_storeu_si512(weights + row / 2 * kSide + c * kLanes, paired(first, second));
        }
        total[c] = sum;
        best[c] = high;
        if (j) {
          for (long row = 0; row < kSide; ++row) {
            float *at = sums + row * kSide + c * kLanes;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), fade));
          }
        }
      }
      product(columns, turned_values + j * kBlock, weights, sums, kSide, count / 2, j > 0);
    }
    float divisors[kSide], logarithms[kSide];
    for (long c = 0; c < columns; ++c) {
      _mm512_storeu_ps(divisors + c * kLanes, total[c]);
      _mm512_storeu_ps(logarithms + c * kLanes, _mm512_mul_ps(best[c], scale));
    }
    transpose(reinterpret_cast<Pair *>(sums), kSide, kSide, reinterpret_cast<Pair *>(whole));
    for (long row = 0; row < lines.in_block(i); ++row) {
      const __m512 share = _mm512_set1_ps(1.0f / divisors[row]);
      Half *to = out + (i * kSide + row) * out_stride;
      for (long n = 0; n < kSide; n += kLanes) {
        narrow(to + n, _mm512_mul_ps(share, _mm512_loadu_ps(whole + row * kSide + n)));
      }
      logs[i * kSide + row] = logarithms[row] + std::log2(divisors[row]);
    }
  }
}

struct Gradients {
  Half *queries, *keys, *values;
};

void attend_back(const Lines &lines, const Half *queries, const Half *keys, const Half *values, const Half *out,
                 const Half *out_gradient, long out_stride, const float *logs, const Gradients &to) {
  const Tiles tiles;
  const long blocks = lines.blocks(), size = blocks * kBlock;
  Room room(7 * 4 * size + 2 * 4 * blocks * kSide + 8 * 4 * kBlock);
  Half *rows = room.take<Half>(size), *k = room.take<Half>(size), *v = room.take<Half>(size);
  Half *turned_keys = room.take<Half>(size);
  Pair *q = room.take<Pair>(size / 2), *q_rows = room.take<Pair>(size / 2);
  Pair *g = room.take<Pair>(size / 2), *g_rows = room.take<Pair>(size / 2);
  float *q_sums = room.take<float>(size), *logarithms = room.take<float>(blocks * kSide);
  float *along = room.take<float>(blocks * kSide);
  float *scores = room.take<float>(kBlock), *changes = room.take<float>(kBlock);
  float *k_sums = room.take<float>(kBlock), *v_sums = room.take<float>(kBlock);
  Half *weights = room.take<Half>(kBlock), *slopes = room.take<Half>(kBlock);
  Pair *slope_pairs = room.take<Pair>(kPairs * kSide);

  gather_turned(lines, keys, k);
  pair_rows(k, blocks, q);
  turn_pairs(q, blocks, turned_keys);
  gather_turned(lines, queries, rows);
  pair_numbers(rows, blocks, q);
  pair_rows(rows, blocks, q_rows);
  Lines gradient_lines = lines;
  gradient_lines.stride = out_stride;
  gather(gradient_lines, out_gradient, rows);
  pair_numbers(rows, blocks, g);
  pair_rows(rows, blocks, g_rows);
  std::memset(logarithms, 0, 4 * blocks * kSide);
  std::memset(along, 0, 4 * blocks * kSide);
  for (long row = 0; row < lines.count; ++row) {
    __m512 sum = _mm512_setzero_ps();
    for (long n = 0; n < kSide; n += kLanes) {
      sum = _mm512_fmadd_ps(wide(out + row * out_stride + n), wide(rows + row * kSide + n), sum);
    }
    along[row] = _mm512_reduce_add_ps(sum);
    logarithms[row] = logs[row];
  }
  gather(lines, values, v);
  std::memset(q_sums, 0, 4 * size);
  const __m512 scale = _mm512_set1_ps(kScale * kLog2E);
  for (long j = 0; j < blocks; ++j) {
    const long count = rounded(lines.in_block(j), kKeyStep);
    for (long i = j; i < blocks; ++i) {
      const long columns = rounded(lines.in_block(i), kColumnStep * kLanes) / kLanes;
      product(columns, k + j * kBlock, q + i * kPairs * kSide, scores, count, kPairs, false);
      product(columns, v + j * kBlock, g + i * kPairs * kSide, changes, count, kPairs, false);
      for (long c = 0; c < columns; ++c) {
        const __m512 base = _mm512_loadu_ps(logarithms + i * kSide + c * kLanes);
        const __m512 mean = _mm512_loadu_ps(along + i * kSide + c * kLanes);
        for (long row = 0; row < count; row += 2) {
          __m512 slope[2];
          for (long two = 0; two < 2; ++two) {
            const long at = (row + two) * kSide + c * kLanes;
            const __mmask16 mask = i == j ? seen(row + two, c * kLanes) : 0xffff;
            const __m512 power = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + at), scale, base));
            const __m512 weight = _mm512_maskz_mov_ps(mask, power);
            slope[two] = _mm512_mul_ps(weight, _mm512_sub_ps(_mm512_loadu_ps(changes + at), mean));
            narrow(weights + at, weight);
            narrow(slopes + at, slope[two]);
          }
          _mm512_storeu_si512(slope_pairs + row / 2 * kSide + c * kLanes, paired(slope[0], slope[1]));
        }
      }
      product(4, weights, g_rows + i * kPairs * kSide, v_sums, count, 8 * columns, i > j);
      product(4, slopes, q_rows + i * kPairs * kSide, k_sums, count, 8 * columns, i > j);
      product(columns, turned_keys + j * kBlock, slope_pairs, q_sums + i * kBlock, kSide, count / 2, true);
    }
    for (long row = 0; row < lines.in_block(j); ++row) {
      scatter_turned(lines, k_sums + row * kSide, to.keys, j * kSide + row);
      for (long n = 0; n < kSide; n += kLanes) {
        narrow(to.values + (j * kSide + row) * lines.stride + n, _mm512_loadu_ps(v_sums + row * kSide + n));
      }
    }
  }
  for (long i = 0; i < blocks; ++i) {
    transpose(reinterpret_cast<Pair *>(q_sums + i * kBlock), kSide, kSide, reinterpret_cast<Pair *>(scores));
    for (long row = 0; row < lines.in_block(i); ++row) {
      scatter_turned(lines, scores + row * kSide, to.queries, i * kSide + row);
    }
  }
}

float sum_of_squares(const float *row, long width) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < width; i += kLanes) {
    const __m512 x = _mm512_loadu_ps(row + i);
    sum = _mm512_fmadd_ps(x, x, sum);
  }
  return _mm512_reduce_add_ps(sum);
}

__m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)))));
}

}  // namespace

extern "C" {

// Documents lie one behind the other, document d from row first[d] on; `qkv` has 3 * heads * 64 numbers a row, `out`
// heads * 64, `logs` is [heads][rows]. `order` is the order in which documents are begun, the longest first.
void penstock_attention(const Half *qkv, const std::int64_t *first, const std::int64_t *order, std::int64_t documents,
                        std::int64_t heads, const float *cos, const float *sin, Half *out, float *logs) {
  const long width = heads * kSide, rows = first[documents];
#pragma omp parallel for schedule(dynamic, 1)
  for (long task = 0; task < documents * heads; ++task) {
    const long document = order[task / heads], head = task % heads, begin = first[document];
    const Lines lines{first[document + 1] - begin, 3 * width, cos, sin};
    const Half *q = qkv + begin * 3 * width + head * kSide;
    attend(lines, q, q + width, q + 2 * width, out + begin * width + head * kSide, width, logs + head * rows + begin);
  }
}

void penstock_attention_back(const Half *qkv, const std::int64_t *first, const std::int64_t *order,
                             std::int64_t documents, std::int64_t heads, const float *cos, const float *sin,
                             const Half *out, const float *logs, const Half *out_gradient, Half *gradient) {
  const long width = heads * kSide, rows = first[documents];
#pragma omp parallel for schedule(dynamic, 1)
  for (long task = 0; task < documents * heads; ++task) {
    const long document = order[task / heads], head = task % heads, begin = first[document];
    const Lines lines{first[document + 1] - begin, 3 * width, cos, sin};
    const Half *q = qkv + begin * 3 * width + head * kSide;
    Half *to = gradient + begin * 3 * width + head * kSide;
    const long at = begin * width + head * kSide;
    attend_back(lines, q, q + width, q + 2 * width, out + at, out_gradient + at, width, logs + head * rows + begin,
                {to, to + width, to + 2 * width});
  }
}

// sum = x + change (if there is one), normed = sum / rms(sum) * weight, inverse = 1 / rms(sum).
void penstock_norm(const float *x, const Half *change, const float *weight, float epsilon, std::int64_t rows,
                   std::int64_t width, float *sum, Half *normed, float *inverse) {
#pragma omp parallel for schedule(static)
  for (long row = 0; row < rows; ++row) {
    const float *in = x + row * width;
    if (change) {
      for (long i = 0; i < width; i += kLanes) {
        const __m512 both = _mm512_add_ps(_mm512_loadu_ps(in + i), wide(change + row * width + i));
        _mm512_storeu_ps(sum + row * width + i, both);
      }
      in = sum + row * width;
    }
    inverse[row] = 1.0f / std::sqrt(sum_of_squares(in, width) / float(width) + epsilon);
    const __m512 factor = _mm512_set1_ps(inverse[row]);
    for (long i = 0; i < width; i += kLanes) {
      const __m512 level = _mm512_mul_ps(_mm512_loadu_ps(in + i), factor);
      narrow(normed + row * width + i, _mm512_mul_ps(level, _mm512_loadu_ps(weight + i)));
    }
  }
}

// gradient = what comes through the norm, and what the sum has besides (if it has); in bfloat16 too. The weight's is
// summed up over rows.
void penstock_norm_back(const Half *normed_gradient, const float *besides, const float *sum, const float *weight,
                        const float *inverse, std::int64_t rows, std::int64_t width, float *gradient, Half *narrowed,
                        float *weight_gradient) {
  std::vector<float> parts(kChunks * width);
  const long each = (rows + kChunks - 1) / kChunks;
#pragma omp parallel for schedule(static)
  for (long chunk = 0; chunk < kChunks; ++chunk) {
    float *part = parts.data() + chunk * width;
    for (long row = chunk * each; row < std::min<long>(rows, (chunk + 1) * each); ++row) {
      const Half *change = normed_gradient + row * width;
      const float *in = sum + row * width;
      const __m512 factor = _mm512_set1_ps(inverse[row]);
      __m512 dot = _mm512_setzero_ps();
      for (long i = 0; i < width; i += kLanes) {
        const __m512 product = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(in + i), factor), wide(change + i));
        _mm512_storeu_ps(part + i, _mm512_add_ps(_mm512_loadu_ps(part + i), product));
        dot = _mm512_fmadd_ps(product, _mm512_loadu_ps(weight + i), dot);
      }
      const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot) / float(width) * inverse[row]);
      for (long i = 0; i < width; i += kLanes) {
        const __m512 other = besides ? _mm512_loadu_ps(besides + row * width + i) : _mm512_setzero_ps();
        const __m512 direct = _mm512_mul_ps(wide(change + i), _mm512_loadu_ps(weight + i));
        const __m512 less = _mm512_fnmadd_ps(_mm512_loadu_ps(in + i), mean, direct);
        const __m512 found = _mm512_fmadd_ps(less, factor, other);
        _mm512_storeu_ps(gradient + row * width + i, found);
        narrow(narrowed + row * width + i, found);
      }
    }
  }
  std::fill(weight_gradient, weight_gradient + width, 0.0f);
  for (long chunk = 0; chunk < kChunks; ++chunk) {
    for (long i = 0; i < width; ++i) weight_gradient[i] += parts[chunk * width + i];
  }
}

// out = silu(gate) * up; each row of `both` is the gate, then up.
void penstock_gate(const Half *both, std::int64_t rows, std::int64_t inner, Half *out) {
#pragma omp parallel for schedule(static)
  for (long row = 0; row < rows; ++row) {
    const Half *gate = both + row * 2 * inner, *up = gate + inner;
    for (long i = 0; i < inner; i += kLanes) {
      const __m512 x = wide(gate + i);
      narrow(out + row * inner + i, _mm512_mul_ps(_mm512_mul_ps(x, sigmoid(x)), wide(up + i)));
    }
  }
}

void penstock_gate_back(const Half *both, const Half *out_gradient, std::int64_t rows, std::int64_t inner,
                        Half *gradient) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for schedule(static)
  for (long row = 0; row < rows; ++row) {
    const Half *gate = both + row * 2 * inner, *up = gate + inner;
    Half *to = gradient + row * 2 * inner;
    for (long i = 0; i < inner; i += kLanes) {
      const __m512 x = wide(gate + i), change = wide(out_gradient + row * inner + i), share = sigmoid(x);
      const __m512 slope = _mm512_mul_ps(share, _mm512_fmadd_ps(x, _mm512_sub_ps(one, share), one));
      narrow(to + i, _mm512_mul_ps(_mm512_mul_ps(change, wide(up + i)), slope));
      narrow(to + inner + i, _mm512_mul_ps(change, _mm512_mul_ps(x, share)));
    }
  }
}

// losses[row] = weight * -log softmax(logits)[target], and its gradient in place of the logits.
void penstock_cross_entropy(Half *logits, const std::int64_t *targets, const float *weights, std::int64_t rows,
                            std::int64_t vocabulary, float *losses) {
#pragma omp parallel
  {
    std::vector<float> powers(vocabulary);
#pragma omp for schedule(static)
    for (long row = 0; row < rows; ++row) {
      Half *line = logits + row * vocabulary;
      __m512 high = _mm512_set1_ps(kLowest), sum = _mm512_setzero_ps();
      for (long i = 0; i < vocabulary; i += kLanes) high = _mm512_max_ps(high, wide(line + i));
      const float best = _mm512_reduce_max_ps(high), aim = wide_one(line[targets[row]]);
      const __m512 scale = _mm512_set1_ps(kLog2E), base = _mm512_set1_ps(best * kLog2E);
      for (long i = 0; i < vocabulary; i += kLanes) {
        const __m512 power = exp2(_mm512_fmsub_ps(wide(line + i), scale, base));
        _mm512_storeu_ps(powers.data() + i, power);
        sum = _mm512_add_ps(sum, power);
      }
      const float total = _mm512_reduce_add_ps(sum);
      losses[row] = weights[row] * (best + std::log(total) - aim);
      const __m512 share = _mm512_set1_ps(weights[row] / total);
      powers[targets[row]] -= total;
      for (long i = 0; i < vocabulary; i += kLanes) {
        narrow(line + i, _mm512_mul_ps(_mm512_loadu_ps(powers.data() + i), share));
      }
    }
  }
}

}  // extern "C"
