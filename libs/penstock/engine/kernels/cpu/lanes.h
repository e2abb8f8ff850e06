// Sixteen floats at a time, in as many registers as the processors of this build need for them.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;

#if defined(__AVX512BF16__)
constexpr bool kProducts = true;  // the processor multiplies bfloat16
#else
constexpr bool kProducts = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool kTiles = true;  // and does so in tiles, see amx.h
#else
constexpr bool kTiles = false;
#endif

typedef float FloatPart __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntPart __attribute__((vector_size(kWidth * 4)));
typedef uint32_t WordPart __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(kWidth * 2)));

// Converts kWidth bytes to integers. Where they fill only a part of a register, the compiler's own conversion goes byte
// by byte.
inline IntPart widened(const int8_t *at) {
#if defined(__AVX512F__)
  return (IntPart)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
#elif defined(__AVX2__)
  return (IntPart)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
#else
  IntPart wide;
  for (int lane = 0; lane < kWidth; ++lane) wide[lane] = at[lane];
  return wide;
#endif
}

#define EACH for (int i = 0; i < kParts; ++i)

struct Floats {
  FloatPart part[kParts];

  static inline Floats all(float value) {
    Floats v;
    EACH v.part[i] = FloatPart{} + value;
    return v;
  }
  static inline Floats load(const float *at) {
    Floats v;
    EACH std::memcpy(&v.part[i], at + i * kWidth, sizeof v.part[i]);
    return v;
  }
  static inline Floats load(const int8_t *at) {
    Floats v;
    EACH { v.part[i] = __builtin_convertvector(widened(at + i * kWidth), FloatPart); }
    return v;
  }
  static inline Floats load(const uint16_t *at) {  // from bfloat16
    Floats v;
    EACH {
      HalfPart halves;
      std::memcpy(&halves, at + i * kWidth, sizeof halves);
      v.part[i] = (FloatPart)(__builtin_convertvector(halves, WordPart) << 16);
    }
    return v;
  }
  inline void store(float *at) const { EACH std::memcpy(at + i * kWidth, &part[i], sizeof part[i]); }
#if defined(__AVX512BF16__)
  // Rounds to the nearest bfloat16.
  inline void round(uint16_t *at) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), (__m256i)_mm512_cvtneps_pbh((__m512)part[0]));
  }
#else
  inline void round(uint16_t *) const {}
#endif

  inline Floats &operator+=(const Floats &o) {
    EACH part[i] += o.part[i];
    return *this;
  }
  inline Floats &operator*=(const Floats &o) {
    EACH part[i] *= o.part[i];
    return *this;
  }
  inline Floats &operator*=(float o) {
    EACH part[i] *= o;
    return *this;
  }
  // this += a * b, in one rounding where the processor can
  inline void add(const Floats &a, float b) { EACH part[i] += a.part[i] * b; }
  inline void add(const Floats &a, const Floats &b) { EACH part[i] += a.part[i] * b.part[i]; }

  // Makes the compiler keep the value in registers instead of loading it for each use: the loop is bound by loads.
  inline void hold() {
#if defined(__x86_64__)
    EACH asm("" : "+x"(part[i]));
#endif
  }
  inline void most(const Floats &o) { EACH part[i] = part[i] < o.part[i] ? o.part[i] : part[i]; }
  inline float highest() const {
    float flat[kLanes], most;
    store(flat), most = flat[0];
    for (int i = 1; i < kLanes; ++i) most = most < flat[i] ? flat[i] : most;
    return most;
  }
  inline float total() const {
    float flat[kLanes];
    store(flat);
    for (int half = kLanes / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) flat[i] += flat[i + half];
    return flat[0];
  }
};

typedef float FourFloats __attribute__((vector_size(16)));

// The totals of four vectors, each added in the order of `total`, without going through memory.
inline FourFloats totals(const Floats *sum) {
#if defined(__AVX2__)
  __m256 half[4];
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m512 all = (__m512)sum[i].part[0];
    half[i] =
        _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
#else
    half[i] = _mm256_add_ps((__m256)sum[i].part[0], (__m256)sum[i].part[1]);
#endif
  }
  auto fold = [&](int i) { return _mm_add_ps(_mm256_castps256_ps128(half[i]), _mm256_extractf128_ps(half[i], 1)); };
  auto pair = [](__m128 a, __m128 b) { return _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)); };
  const __m128 low = pair(fold(0), fold(1)), high = pair(fold(2), fold(3));
  return (FourFloats)_mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd));
#else
  return FourFloats{sum[0].total(), sum[1].total(), sum[2].total(), sum[3].total()};
#endif
}

inline Floats operator+(Floats a, const Floats &b) { return a += b; }
inline Floats operator*(Floats a, const Floats &b) { return a *= b; }
inline Floats operator*(Floats a, float b) { return a *= b; }

// The weights of two consecutive inputs for 16 columns in bfloat16: a 32-bit lane holds both weights of a column.
struct Pairs {
  WordPart part[kParts];

  static inline Pairs load(const void *at) {
    Pairs v;
    EACH std::memcpy(&v.part[i], static_cast<const char *>(at) + i * kWidth * 4, sizeof v.part[i]);
    return v;
  }
  // For numbers that are exact in bfloat16.
  static inline Pairs of(const Floats &even, const Floats &odd) {
    Pairs v;
    EACH v.part[i] = ((WordPart)odd.part[i] & 0xffff0000u) | (WordPart)even.part[i] >> 16;
    return v;
  }
  inline void store(void *at) const {
    EACH std::memcpy(static_cast<char *>(at) + i * kWidth * 4, &part[i], sizeof part[i]);
  }
  inline void split(Floats &even, Floats &odd) const {
    EACH even.part[i] = (FloatPart)(part[i] << 16);
    EACH odd.part[i] = (FloatPart)(part[i] & 0xffff0000u);
  }
};

// Adds to `sum` the products of a pair of weights with the pair of bfloat16 in `x`, where the processor can.
inline void add_pairs([[maybe_unused]] Floats &sum, [[maybe_unused]] const Pairs &weights, [[maybe_unused]] float x) {
#if defined(__AVX512BF16__)
  sum.part[0] =
      (FloatPart)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)weights.part[0], (__m512bh)_mm512_set1_ps(x));
#endif
}

// The same with a pair of its own in each lane. The order of the two additions is that of the function above.
inline void add_pairs([[maybe_unused]] Floats &sum, [[maybe_unused]] const Pairs &a, [[maybe_unused]] const Pairs &b) {
#if defined(__AVX512BF16__)
  sum.part[0] = (FloatPart)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
#endif
}

// Makes of two rows of 32 bfloat16 the pairs of their columns, in an order of its own: 4 of 8 columns, then the others.
inline void interleave([[maybe_unused]] const void *even, [[maybe_unused]] const void *odd, [[maybe_unused]] Pairs &one,
                       [[maybe_unused]] Pairs &two) {
#if defined(__AVX512BW__)
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  one.part[0] = (WordPart)_mm512_unpacklo_epi16(a, b), two.part[0] = (WordPart)_mm512_unpackhi_epi16(a, b);
#endif
}

// Rounds two vectors to the nearest bfloat16 and pairs their lanes.
inline Pairs rounded([[maybe_unused]] const Floats &even, [[maybe_unused]] const Floats &odd) {
  Pairs both = {};
#if defined(__AVX512BF16__)
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even.part[0]));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd.part[0]));
  both.part[0] = (WordPart)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#endif
  return both;
}

// Restores a pair of inputs of a lossless panel: 32 bytes of sign and mantissa, then 32 indices of 4 bits into the
// palette of exponents. `parts` gives what an index stands for in the upper and in the lower byte of a bfloat16.
inline Pairs restore(const char *at, const uint8_t *parts) {
#if defined(__AVX2__)
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(parts)));
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(parts + 16)));
  const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at + 32));
  const __m256i index = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
  const __m256i sign = _mm256_set1_epi8(char(0x80));
  const __m256i high = _mm256_or_si256(_mm256_shuffle_epi8(upper, index), _mm256_and_si256(own, sign));
  const __m256i low = _mm256_or_si256(_mm256_shuffle_epi8(lower, index), _mm256_andnot_si256(sign, own));
  const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
#if defined(__AVX512F__)
  return {{(WordPart)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)}};
#else
  return {{(WordPart)first, (WordPart)second}};
#endif
#else
  uint16_t pairs[32];
  for (int lane = 0; lane < 32; ++lane) {
    const int from =
        lane / 8 % 2 * 16 + lane / 16 * 8 + lane % 8;  // the place that unpacking 128-bit halves takes it from
    const uint8_t own = uint8_t(at[from]), index = uint8_t(at[32 + from % 16]) >> from / 16 * 4 & 15;
    pairs[lane] = uint16_t((parts[index] | (own & 0x80)) << 8 | parts[16 + index] | (own & 0x7f));
  }
  return Pairs::load(pairs);
#endif
}

// The numbers of one pair of inputs of INT4, from -8 to 7: those of pair i lie in the bits from 4 i and from 16 + 4 i
// on of 16 words.
inline void four_bits(const char *words, int pair, Floats &even, Floats &odd) {
  EACH {
    WordPart both;
    std::memcpy(&both, words + i * kWidth * 4, sizeof both);
    even.part[i] = __builtin_convertvector((IntPart)(both << (28 - 4 * pair)) >> 28, FloatPart);
    odd.part[i] = __builtin_convertvector((IntPart)(both << (12 - 4 * pair)) >> 28, FloatPart);
  }
}

#if defined(__AVX512BF16__)
// The same as pairs of bfloat16.
inline Pairs four_bits(const char *words, int pair) {
  static constexpr auto kNumbers = [] {
    std::array<uint16_t, 32> found{};  // twice, because an index has five bits, of which the last is another pair's
    for (int i = 0; i < 32; ++i) found[i] = uint16_t(std::bit_cast<uint32_t>(float(i % 16 - i / 8 % 2 * 16)) >> 16);
    return found;
  }();
  const auto index = (__m512i)(Pairs::load(words).part[0] >> 4 * pair);
  return {{(WordPart)_mm512_permutexvar_epi16(index, _mm512_loadu_si512(kNumbers.data()))}};
}
#endif

#if defined(__AVX512BW__)
// Restores two pairs at once and writes them to `to`.
inline void restore_two(const char *one, const char *other, const uint8_t *parts, void *to) {
  auto sixteen = [](const void *at) { return _mm_loadu_si128(static_cast<const __m128i *>(at)); };
  auto join = [](__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); };
  auto own_of = [](const char *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); };
  const __m512i upper = _mm512_broadcast_i32x4(sixteen(parts)), lower = _mm512_broadcast_i32x4(sixteen(parts + 16));
  const __m512i own = join(own_of(one), own_of(other)), sign = _mm512_set1_epi8(char(0x80));
  const __m512i both =
      join(_mm256_broadcastsi128_si256(sixteen(one + 32)), _mm256_broadcastsi128_si256(sixteen(other + 32)));
  const __m512i index =
      _mm512_and_si512(_mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)), _mm512_set1_epi8(15));
  const __m512i high = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(upper, index), own, sign, 0xf8);  // a | (b & c)
  const __m512i low = _mm512_ternarylogic_epi64(_mm512_shuffle_epi8(lower, index), own, sign, 0xf4);   // a | (b & ~c)
  const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  _mm512_storeu_si512(to, _mm512_shuffle_i64x2(first, second, 0x44));
  _mm512_storeu_si512(static_cast<char *>(to) + 64, _mm512_shuffle_i64x2(first, second, 0xee));
}
#endif

// e^x for x <= 0, as 2^n * e^r with |r| <= ln(2) / 2 and a polynomial for e^r. The relative error is at most 2e-7 down
// to x = -87.
inline Floats exponential(const Floats &given) {
  Floats result;
  EACH {
    const FloatPart low = FloatPart{} - 87.0f;
    const FloatPart x = given.part[i] < low ? low : given.part[i];
    const IntPart n = __builtin_convertvector(x * 1.44269504f - 0.5f, IntPart);  // rounds to nearest, as x <= 0
    const FloatPart whole = __builtin_convertvector(n, FloatPart);
    const FloatPart r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    FloatPart p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    result.part[i] = p * (FloatPart)((n + 127) << 23);
  }
  return result;
}

// x / (1 + e^-x)
inline Floats silu(const Floats &x) {
  Floats negative, result;
  EACH negative.part[i] =
      x.part[i] < 0 ? x.part[i] : -x.part[i];  // -|x|, since `exponential` takes no positive numbers
  const Floats e = exponential(negative);
  EACH result.part[i] = x.part[i] * (x.part[i] < 0 ? e.part[i] : FloatPart{} + 1.0f) / (e.part[i] + 1.0f);
  return result;
}

#undef EACH

}  // namespace penstock
