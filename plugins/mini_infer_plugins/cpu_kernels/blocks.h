// Matrices that are blocks of small integers: recognised in float32 weights, and multiplied as such.
//
// Contract: lossless. `pack` succeeds only if every number of a float32 matrix is, bit for bit, scale * integer + least of
// its block of 32 along a row, as files of 4- and 8-bit weights give (GGUF's Q4_0, Q4_1 and Q8_0). A product then makes
// the same float32 numbers in registers and adds in the same order as the product of the float32 matrix: the same bits,
// from a fifth or a quarter of the memory.
#pragma once

#include "vector_lanes.h"

#include <algorithm>
#include <cmath>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace blocks {

using namespace lanes;

constexpr int kBlock = 32;

struct Block4 {
  float scale, least;
  uint8_t pairs[kBlock / 2];  // number i in the low half of byte i, number i + 16 in the high half

  static constexpr int kMost = 15;
  int number(int i) const { return i < 16 ? pairs[i] & 15 : pairs[i - 16] >> 4; }
  void set(int i, int number) {
    uint8_t& pair = pairs[i % 16];
    pair = i < 16 ? (pair & 0xf0) | number : (pair & 0x0f) | (number << 4);
  }
};

struct Block8 {
  float scale;
  int8_t numbers[kBlock];

  static constexpr int kMost = 127;
};

// kWidth bytes as floats. Compilers make a detour of the general form.
#if defined(__AVX512F__)
inline Vec<16> widened(const uint8_t* from) {
  return (Vec<16>)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Vec<16> widened(const int8_t* from) {
  return (Vec<16>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
#elif defined(__AVX2__)
inline Vec<8> widened(const uint8_t* from) {
  return (Vec<8>)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline Vec<8> widened(const int8_t* from) {
  return (Vec<8>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
#else
template <class Byte>
inline Vec<kWidth> widened(const Byte* from) {
  Vec<kWidth> v;
  for (int i = 0; i < kWidth; i++) v[i] = from[i];
  return v;
}
#endif

// The numbers of a block, kWidth at a time.
template <class B>
struct Parts;

#if defined(__AVX512F__)
// A block's 16 values fit a register: its bytes look them up, and only their lowest four bits count.
template <>
struct Parts<Block4> {
  __m512 values;
  __m512i pairs;
  explicit Parts(const Block4& b) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    values = _mm512_fmadd_ps(numbers, _mm512_set1_ps(b.scale), _mm512_set1_ps(b.least));
    pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)b.pairs));
  }
  template <int P>
  Vec<16> part() const {
    return (Vec<16>)_mm512_permutexvar_ps(P == 0 ? pairs : _mm512_srli_epi32(pairs, 4), values);
  }
};
#else
template <>
struct Parts<Block4> {
  const Block4& b;
  explicit Parts(const Block4& block) : b(block) {}
  template <int P>
  Vec<kWidth> part() const {
    uint8_t numbers[kWidth];
    for (int i = 0; i < kWidth; i++) {
      uint8_t pair = b.pairs[P * kWidth % 16 + i];
      numbers[i] = P * kWidth < 16 ? pair & 15 : pair >> 4;
    }
    return widened(numbers) * b.scale + b.least;
  }
};
#endif

template <>
struct Parts<Block8> {
  const Block8& b;
  explicit Parts(const Block8& block) : b(block) {}
  template <int P>
  Vec<kWidth> part() const {
    return widened(b.numbers + P * kWidth) * b.scale;
  }
};

// -- packing ----------------------------------------------------------------------------------------------------------

// The number with 11 significant bits next to x >= 0, as scales have that were kept in half precision.
inline float half_near(float x) {
  constexpr float kSmallest = 0x1p-14f, kStep = 0x1p-24f;
  if (x < kSmallest) return std::nearbyint(x / kStep) * kStep;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// The half-precision neighbours of a scale; the quotient that it is guessed from carries rounding errors.
inline float half_beside(float x, int steps) {
  float step = x < 0x1p-14f ? 0x1p-24f : std::ldexp(1.f, std::ilogb(x) - 10);
  return x + steps * step;
}

inline bool fill_block(const float* w, float scale, float least, Block4& to) {
  to.scale = scale;
  to.least = least;
  for (int i = 0; i < kBlock; i++) {
    int number = scale == 0.f ? 0 : (int)std::lround((w[i] - least) / scale);
    if (number < 0 || number > Block4::kMost || scale * number + least != w[i]) return false;
    to.set(i, number);
  }
  return true;
}

inline bool fill_block(const float* w, float scale, float, Block8& to) {
  to.scale = scale;
  for (int i = 0; i < kBlock; i++) {
    int number = scale == 0.f ? 0 : (int)std::lround(w[i] / scale);
    if (number < -Block8::kMost || number > Block8::kMost || scale * number != w[i]) return false;
    to.numbers[i] = number;
  }
  return true;
}

inline bool pack_block(const float* w, Block4& to) {
  float least = *std::min_element(w, w + kBlock), most = *std::max_element(w, w + kBlock);
  if (!std::isfinite(least) || !std::isfinite(most)) return false;
  for (int number = Block4::kMost; number >= Block4::kMost / 2; number--) {  // of the largest: not all blocks use their range
    float guess = half_near((most - least) / number);
    for (int steps : {0, 1, -1})
      if (fill_block(w, half_beside(guess, steps), least, to)) return true;
  }
  return false;
}

inline bool pack_block(const float* w, Block8& to) {
  float most = 0.f;
  for (int i = 0; i < kBlock; i++) most = std::max(most, std::abs(w[i]));
  if (!std::isfinite(most)) return false;
  float guess = half_near(most / Block8::kMost);
  for (int steps : {0, 1, -1})
    if (fill_block(w, half_beside(guess, steps), 0.f, to)) return true;
  return false;
}

template <class B>
bool pack(const float* w, int64_t count, B* to, int threads) {
  bool exact = true;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) reduction(&& : exact)
  for (int64_t b = 0; b < count; b++) exact = exact && pack_block(w + b * kBlock, to[b]);
  return exact;
}

// -- products ---------------------------------------------------------------------------------------------------------

template <class B>
struct Product {
  const float* x;
  const B* w;
  const float* bias;
  float* y;
  int64_t rows, outs, k;
};

// With many rows unpacking is shared by as many of them as registers allow; rows of W lie `far` apart as in native.cpp.
constexpr int kTall = kRegisters >= 32 ? 8 : 4, kStreams = kRegisters >= 32 ? 3 : 2;
constexpr int kFewRows = 4, kFewStreams = kRegisters >= 32 ? 5 : 2;
constexpr int kOneRowStreams = 8;
constexpr int kMostRows = 16;   // with more, unpacking costs more than reading saves: the float32 matrix is faster
constexpr int kPrefetch = 512;  // bytes ahead in each stream

template <int M, int N, int P, class B>
inline void multiply_parts(const float* x, int64_t k, const Parts<B>* w, Vec<kWidth> (*sums)[N]) {
  if constexpr (P < kBlock / kWidth) {
    Vec<kWidth> weights[N];
    for (int n = 0; n < N; n++) weights[n] = w[n].template part<P>();
    for (int m = 0; m < M; m++) {
      Vec<kWidth> v = load<kWidth>(x + m * k + P * kWidth);
      for (int n = 0; n < N; n++) sums[m][n] += v * weights[n];
    }
    multiply_parts<M, N, P + 1>(x, k, w, sums);
  }
}

template <class B, int M, int N, int... I>
inline void multiply_block(const float* x, int64_t k, const B* const* w, Vec<kWidth> (*sums)[N],
                           std::integer_sequence<int, I...>) {
  const Parts<B> parts[N] = {Parts<B>(*w[I])...};
  multiply_parts<M, N, 0, B>(x, k, parts, sums);
}

template <class B, int M, int N>
inline void multiply_tile(const Product<B>& a, int64_t row, int64_t out, int64_t far) {
  Vec<kWidth> sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = Vec<kWidth>{};
  const B* w[N];
  int64_t count = a.k / kBlock;
  for (int n = 0; n < N; n++) w[n] = a.w + (out + n * far) * count;
  for (int64_t b = 0; b < count; b++) {
    for (int n = 0; n < N; n++) __builtin_prefetch((const char*)w[n] + kPrefetch);
    multiply_block<B, M>(a.x + row * a.k + b * kBlock, a.k, w, sums, std::make_integer_sequence<int, N>{});
    for (int n = 0; n < N; n++) w[n]++;
  }
  float totals[(M * N + kWidth - 1) / kWidth * kWidth];
  sum_all<kWidth, M * N>(&sums[0][0], totals);
  for (int n = 0; n < N; n++) {
    int64_t o = out + n * far;
    float bias = a.bias ? a.bias[o] : 0.f;
    for (int m = 0; m < M; m++) a.y[(row + m) * a.outs + o] = totals[m * N + n] + bias;
  }
}

template <class B, int M, int N>
inline void multiply_some(const Product<B>& a, int64_t row, int64_t count, int64_t out, int64_t far) {
  if constexpr (M > 0) {
    if (count == M)
      multiply_tile<B, M, N>(a, row, out, far);
    else
      multiply_some<B, M - 1, N>(a, row, count, out, far);
  }
}

template <class B, int Tall, int N>
inline void multiply_rows(const Product<B>& a, int64_t out, int64_t far) {
  int64_t tiles = (a.rows + Tall - 1) / Tall;
  for (int64_t t = 0; t < tiles; t++) {
    int64_t row = a.rows * t / tiles;
    multiply_some<B, Tall, N>(a, row, a.rows * (t + 1) / tiles - row, out, far);
  }
}

template <class B, int Tall, int N>
void multiply(const Product<B>& a, int threads) {
  int64_t far = a.outs / N;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t out = 0; out < far; out++) multiply_rows<B, Tall, N>(a, out, far);
  for (int64_t out = far * N; out < a.outs; out++) multiply_rows<B, Tall, 1>(a, out, 0);
}

template <class B>
void linear(const Product<B>& a, int threads) {
  if (a.rows == 1)
    multiply<B, 1, kOneRowStreams>(a, threads);
  else if (a.rows <= kFewRows)
    multiply<B, kFewRows, kFewStreams>(a, threads);
  else
    multiply<B, kTall, kStreams>(a, threads);
}

}  // namespace blocks
