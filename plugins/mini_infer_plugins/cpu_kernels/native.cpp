// Products of few rows, norms and gates: what a decode step does between its attentions.
//
// Contract: sums are float32. A row's numbers depend on that row alone, the same bits in any batch that runs here and
// with any number of threads: each output is one sum of kWidth lanes over the inputs in order.
#include "blocks.h"
#include "vector_lanes.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace {

using namespace lanes;

// A product of few rows is bound by reading its matrix W [outs, k]. One core's hardware prefetch follows each stream
// only to the end of its 4 KiB page, so one long stream gets 14 GB/s where several far apart get 19. Hence an output tile
// takes rows of W that lie `far` apart, and its successor goes on where each of them ended:
//
//   W   [ o ][ o+1 ] ...   [ o + far ][ o+1 + far ] ...   [ o + 2 far ] ...
//         ^tile  ^next        ^tile      ^next               ^tile
//
// With more rows than a tile is tall, further passes over the same tile find it in L1; all passes then share the fetching
// of the next tile, so that memory works while they compute.
constexpr int kPrefetch = 512;                      // bytes ahead in each stream, with one pass
constexpr int kOneRowStreams = 8;                   // x has one row
constexpr int kStreams = kRegisters >= 32 ? 6 : 3;  // x has more: streams * tall + streams + 1 registers
constexpr int kTall = 4;                            // rows of x in a tile

// A register's worth of steps along k. bfloat16 is taken apart into even and odd numbers, which needs no shuffle.
template <class T>
struct Step;
template <>
struct Step<float> {
  static constexpr int kSize = kWidth, kParts = 1;
  static void load(const float* from, Vec<kWidth>* parts) { parts[0] = lanes::load<kWidth>(from); }
};
template <>
struct Step<bf16> {
  static constexpr int kSize = 2 * kWidth, kParts = 2;
  static void load(const bf16* from, Vec<kWidth>* parts) {
    Bits<kWidth> pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    parts[0] = (Vec<kWidth>)(pairs << 16);
    parts[1] = (Vec<kWidth>)(pairs & 0xffff0000u);
  }
};

// The product's operands; x has been taken apart as Step says, its rows padded with zeros to whole steps.
template <class T>
struct Product {
  const float* x;
  int64_t x_stride;
  const T *w, *bias;
  T* y;
  int64_t rows, outs, k;
};

template <class T, int M, int N>
inline void multiply_step(const float* x, int64_t x_stride, const T* const* w, Vec<kWidth> (*sums)[N]) {
  constexpr int P = Step<T>::kParts;
  Vec<kWidth> weights[N][P];
  for (int n = 0; n < N; n++) Step<T>::load(w[n], weights[n]);
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) {
      Vec<kWidth> v = load<kWidth>(x + m * x_stride + p * kWidth);
      for (int n = 0; n < N; n++) sums[m][n] += v * weights[n][p];
    }
}

// Rows [row, row + M) of x by rows out, out + far, ... of w, pass number `pass` over them.
template <class T, int M, int N>
inline void multiply_tile(const Product<T>& a, int64_t row, int64_t out, int64_t far, int64_t pass, int64_t passes) {
  constexpr int S = Step<T>::kSize;
  Vec<kWidth> sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = Vec<kWidth>{};
  const float* x = a.x + row * a.x_stride;
  const T* w[N];
  // Each pass fetches its share of the next tile, one step's worth every `passes` steps.
  int64_t i = 0, ahead = passes == 1 ? kPrefetch / sizeof(T) : a.k + pass * a.k / passes, wait = 0;
  for (; i + S <= a.k; i += S) {
    for (int n = 0; n < N; n++) w[n] = a.w + (out + n * far) * a.k + i;
    if (wait == 0) {
      for (int n = 0; n < N; n++) __builtin_prefetch(w[n] + ahead);
      ahead -= (passes - 1) * S;
      wait = passes;
    }
    wait--;
    multiply_step<T, M, N>(x + i, a.x_stride, w, sums);
  }
  if (i < a.k) {
    T padded[N][S] = {};
    for (int n = 0; n < N; n++) {
      std::memcpy(padded[n], a.w + (out + n * far) * a.k + i, (a.k - i) * sizeof(T));
      w[n] = padded[n];
    }
    multiply_step<T, M, N>(x + i, a.x_stride, w, sums);
  }
  float totals[(M * N + kWidth - 1) / kWidth * kWidth];
  sum_all<kWidth, M * N>(&sums[0][0], totals);
  for (int n = 0; n < N; n++) {
    int64_t o = out + n * far;
    float bias = a.bias ? get(a.bias + o) : 0.f;
    for (int m = 0; m < M; m++) put(a.y + (row + m) * a.outs + o, totals[m * N + n] + bias);
  }
}

// All rows of x by one tile of w, which stays in L1.
template <class T, int N>
inline void multiply_rows(const Product<T>& a, int64_t out, int64_t far) {
  int64_t tiles = (a.rows + kTall - 1) / kTall;
  for (int64_t t = 0; t < tiles; t++) {
    int64_t row = a.rows * t / tiles;
    switch (a.rows * (t + 1) / tiles - row) {
      case 1: multiply_tile<T, 1, N>(a, row, out, far, t, tiles); break;
      case 2: multiply_tile<T, 2, N>(a, row, out, far, t, tiles); break;
      case 3: multiply_tile<T, 3, N>(a, row, out, far, t, tiles); break;
      case 4: multiply_tile<T, 4, N>(a, row, out, far, t, tiles); break;
    }
  }
}

template <class T, int N>
void multiply(const Product<T>& a, int threads) {
  int64_t far = a.outs / N;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t out = 0; out < far; out++) multiply_rows<T, N>(a, out, far);
  for (int64_t out = far * N; out < a.outs; out++) multiply_rows<T, 1>(a, out, 0);
}

// x as Product wants it. Whole rows of float32 are so already.
template <class T>
const float* take_apart(const T* x, int64_t rows, int64_t k, int64_t stride, Room<float>& room) {
  constexpr int S = Step<T>::kSize;
  if constexpr (Step<T>::kParts == 1)
    if (stride == k) return x;
  room.resize(rows * stride);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < k; i += S) {
      T padded[S] = {};
      std::memcpy(padded, x + row * k + i, std::min<int64_t>(S, k - i) * sizeof(T));
      Vec<kWidth> parts[2];
      Step<T>::load(padded, parts);
      for (int p = 0; p < Step<T>::kParts; p++) store<kWidth>(room.data() + row * stride + i + p * kWidth, parts[p]);
    }
  return room.data();
}

template <class T>
void linear_any(const T* x, const T* w, const T* bias, T* y, int64_t rows, int64_t outs, int64_t k, int threads) {
  constexpr int S = Step<T>::kSize;
  thread_local Room<float> room;
  int64_t stride = (k + S - 1) / S * S;
  Product<T> a{take_apart(x, rows, k, stride, room), stride, w, bias, y, rows, outs, k};
  if (rows == 1)
    multiply<T, kOneRowStreams>(a, threads);
  else
    multiply<T, kStreams>(a, threads);
}

// One row of x (+ residual, the sum kept in `total`): x / rms(x), rounded to T, times weight.
template <class T>
void norm_row(const T* x, const T* residual, const T* weight, T* total, T* y, int64_t size, float eps) {
  constexpr int W = kWidth;
  Vec<W> squares = {};
  float rest = 0.f;
  int64_t i = 0;
  const T* from = residual ? total : x;
  for (; i + W <= size; i += W) {
    if (residual) store<W>(total + i, load<W>(x + i) + load<W>(residual + i));
    Vec<W> v = load<W>(from + i);
    squares += v * v;
  }
  for (; i < size; i++) {
    if (residual) put(total + i, get(x + i) + get(residual + i));
    rest += get(from + i) * get(from + i);
  }
  float scale = 1.f / std::sqrt((sum<W>(squares) + rest) / size + eps);
  for (i = 0; i + W <= size; i += W) {
    store<W>(y + i, load<W>(from + i) * scale);  // the quotient is rounded first, as checkpoints expect
    store<W>(y + i, load<W>(y + i) * load<W>(weight + i));
  }
  for (; i < size; i++) {
    put(y + i, get(from + i) * scale);
    put(y + i, get(y + i) * get(weight + i));
  }
}

template <class T>
void norm_any(const T* x, const T* residual, const T* weight, T* total, T* y, int64_t rows, int64_t size, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size >= 1 << 16) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = r * size;
    norm_row(x + at, residual ? residual + at : nullptr, weight, residual ? total + at : nullptr, y + at, size, eps);
  }
}

// silu(x) = x / (1 + e^-x); e^-x is taken of -|x| so that it cannot overflow.
template <int N>
Vec<N> silu(Vec<N> x) {
  Vec<N> e = lanes::exp<N>(x < 0.f ? x : -x);
  return x < 0.f ? x * e / (1.f + e) : x / (1.f + e);
}

template <class T>
void gate_any(const T* gate_up, T* y, int64_t rows, int64_t size, int threads) {
  constexpr int W = kWidth;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size >= 1 << 15) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const T *gate = gate_up + r * 2 * size, *up = gate + size;
    T* to = y + r * size;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      store<W>(to + i, silu<W>(load<W>(gate + i)));  // rounded between the two, as PyTorch does
      store<W>(to + i, load<W>(to + i) * load<W>(up + i));
    }
    for (; i < size; i++) {
      put(to + i, silu<1>(load<1>(gate + i))[0]);
      put(to + i, get(to + i) * get(up + i));
    }
  }
}

// The matrices and norms of one pre-norm decoder layer; native.py has the same structure.
struct Matrix {
  const void *weight, *bias;  // [outs, k], and [outs] or null
  const void* blocks;         // the same weights as blocks of so many bits, or null
  int64_t outs, k, bits;
};
struct DecoderLayer {
  Matrix qkv, o, gate_up, down;
  const void *input_norm, *post_norm;
  double input_eps, post_eps;
  int64_t is_bf16;
};

template <class B>
void linear_blocks(const Matrix& m, const float* x, float* y, int64_t rows, int threads) {
  blocks::linear<B>({x, (const B*)m.blocks, (const float*)m.bias, y, rows, m.outs, m.k}, threads);
}

template <class T>
void linear_by(const Matrix& m, const T* x, T* y, int64_t rows, int threads) {
  if constexpr (std::is_same_v<T, float>) {
    int64_t bits = rows <= blocks::kMostRows ? m.bits : 0;
    if (bits == 4) return linear_blocks<blocks::Block4>(m, x, y, rows, threads);
    if (bits == 8) return linear_blocks<blocks::Block8>(m, x, y, rows, threads);
  }
  linear_any(x, (const T*)m.weight, (const T*)m.bias, y, rows, m.outs, m.k, threads);
}

template <class T>
void before_attention_any(const DecoderLayer& l, const T* x, const T* residual, T* total, T* qkv, int64_t rows,
                          int threads) {
  thread_local Room<T> normed;
  normed.resize(rows * l.qkv.k);
  norm_any(x, residual, (const T*)l.input_norm, total, normed.data(), rows, l.qkv.k, (float)l.input_eps, threads);
  linear_by(l.qkv, normed.data(), qkv, rows, threads);
}

template <class T>
void after_attention_any(const DecoderLayer& l, const T* x, const T* residual, T* total, T* y, int64_t rows, int threads) {
  thread_local Room<T> normed, gate_up, gated;
  normed.resize(rows * l.o.outs);
  gate_up.resize(rows * l.gate_up.outs);
  gated.resize(rows * l.down.k);
  linear_by(l.o, x, y, rows, threads);
  norm_any<T>(y, residual, (const T*)l.post_norm, total, normed.data(), rows, l.o.outs, (float)l.post_eps, threads);
  linear_by(l.gate_up, normed.data(), gate_up.data(), rows, threads);
  gate_any(gate_up.data(), gated.data(), rows, l.down.k, threads);
  linear_by(l.down, gated.data(), y, rows, threads);
}

}  // namespace

extern "C" {

// A layer up to its attention: qkv [rows, qkv.outs] of the norm of x, or with a residual of total = x + residual.
void before_attention(const DecoderLayer* l, const void* x, const void* residual, void* total, void* qkv, int64_t rows,
                      int threads) {
  if (l->is_bf16)
    before_attention_any(*l, (const bf16*)x, (const bf16*)residual, (bf16*)total, (bf16*)qkv, rows, threads);
  else
    before_attention_any(*l, (const float*)x, (const float*)residual, (float*)total, (float*)qkv, rows, threads);
}

// The rest of it: y [rows, hidden] of the gated MLP, and total = o(x) + residual that y is to be added to.
void after_attention(const DecoderLayer* l, const void* x, const void* residual, void* total, void* y, int64_t rows,
                     int threads) {
  if (l->is_bf16)
    after_attention_any(*l, (const bf16*)x, (const bf16*)residual, (bf16*)total, (bf16*)y, rows, threads);
  else
    after_attention_any(*l, (const float*)x, (const float*)residual, (float*)total, (float*)y, rows, threads);
}

// y [rows, m.outs] = x [rows, m.k] by the matrix transposed + bias; all contiguous.
void linear(const Matrix* m, int is_bf16, const void* x, void* y, int64_t rows, int threads) {
  if (is_bf16)
    linear_by(*m, (const bf16*)x, (bf16*)y, rows, threads);
  else
    linear_by(*m, (const float*)x, (float*)y, rows, threads);
}

// Bytes of a block of 32 weights.
int64_t block_bytes(int bits) { return bits == 4 ? sizeof(blocks::Block4) : sizeof(blocks::Block8); }

// w [count * 32] as blocks; whether they are exactly these numbers.
int pack(int bits, const float* w, int64_t count, void* to, int threads) {
  return bits == 4 ? blocks::pack(w, count, (blocks::Block4*)to, threads)
                   : blocks::pack(w, count, (blocks::Block8*)to, threads);
}

// y [rows, size] = the norm of x, or with a residual of total = x + residual.
void add_rms_norm(int is_bf16, const void* x, const void* residual, const void* weight, void* total, void* y, int64_t rows,
                  int64_t size, float eps, int threads) {
  if (is_bf16)
    norm_any((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)total, (bf16*)y, rows, size, eps, threads);
  else
    norm_any((const float*)x, (const float*)residual, (const float*)weight, (float*)total, (float*)y, rows, size, eps,
             threads);
}

// y [rows, size] = silu(gate_up[:, :size]) * gate_up[:, size:].
void silu_and_mul(int is_bf16, const void* gate_up, void* y, int64_t rows, int64_t size, int threads) {
  if (is_bf16)
    gate_any((const bf16*)gate_up, (bf16*)y, rows, size, threads);
  else
    gate_any((const float*)gate_up, (float*)y, rows, size, threads);
}

}  // extern "C"
