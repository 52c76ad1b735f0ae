// Vectors of floats as wide as the machine's registers, over float32 and bfloat16 memory.
//
// Contract: plain C++17 with the vector extensions of GCC and Clang, so that the same text becomes AVX-512, AVX2 or NEON
// under -march=native. All arithmetic is float32, and every reduction has one fixed order: results are the same bits
// from run to run, whatever the number of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace lanes {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif

// Memory between operators. It begins at a cache line, so that no register's worth lies across two: products of 8 rows
// took a third longer.
template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  Aligned() = default;
  template <class Other>
  Aligned(const Aligned<Other>&) {}
  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), kLine); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
template <class T>
using Room = std::vector<T, Aligned<T>>;

struct bf16 {
  uint16_t bits;
};

template <int N>
struct Types {
  typedef float Float __attribute__((vector_size(N * 4)));
  typedef int32_t Int __attribute__((vector_size(N * 4)));
  typedef uint32_t Bits __attribute__((vector_size(N * 4)));
  typedef uint16_t Half __attribute__((vector_size(N * 2)));
};
template <int N>
using Vec = typename Types<N>::Float;
template <int N>
using Bits = typename Types<N>::Bits;

template <int N>
inline Vec<N> load(const float* from) {
  Vec<N> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <int N>
inline Vec<N> load(const bf16* from) {
  typename Types<N>::Half half;
  std::memcpy(&half, from, sizeof half);
  return (Vec<N>)(__builtin_convertvector(half, Bits<N>) << 16);
}

template <int N>
inline void store(float* to, Vec<N> v) {
  std::memcpy(to, &v, sizeof v);
}

// Rounds to nearest even; a NaN stays one.
template <int N>
inline void store(bf16* to, Vec<N> v) {
  Bits<N> bits = (Bits<N>)v;
  Bits<N> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits<N> quiet = (bits >> 16) | 0x40;
  rounded = v == v ? rounded : quiet;
  typename Types<N>::Half half = __builtin_convertvector(rounded, typename Types<N>::Half);
  std::memcpy(to, &half, sizeof half);
}

template <class T>
inline float get(const T* from) {
  return load<1>(from)[0];
}

template <class T>
inline void put(T* to, float x) {
  store<1>(to, Vec<1>{x});
}

template <int N>
inline Vec<N> fill(float x) {
  return Vec<N>{} + x;
}

template <int N>
inline void halves(Vec<N> v, Vec<N / 2>& low, Vec<N / 2>& high) {
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
}

template <int N>
inline float sum(Vec<N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    Vec<N / 2> low, high;
    halves<N>(v, low, high);
    return sum<N / 2>(low + high);
  }
}

// The sums of `Count` vectors, lane for lane in the order of `sum`, in an eighth of its steps: two vectors become one that
// holds the half sums of both, and so on. `to` has room for whole vectors.
//
//   [ a0 a1 a2 a3 ] [ b0 b1 b2 b3 ]  ->  [ a0+a2 a1+a3 b0+b2 b1+b3 ]  ->  ...
#if defined(__clang__) || __GNUC__ >= 12
template <int N, int Half, int... Lane>
inline Vec<N> half_sums(Vec<N> a, Vec<N> b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (Lane / Half * 2 * Half + Lane % Half)...) +
         __builtin_shufflevector(a, b, (Lane / Half * 2 * Half + Lane % Half + Half)...);
}

template <int N, int Count, int Half = N / 2>
inline void sum_all(const Vec<N>* v, float* to) {
  if constexpr (Half == 0) {
    for (int i = 0; i < Count; i++) store<N>(to + i * N, v[i]);
  } else {
    constexpr int kNext = (Count + 1) / 2;
    Vec<N> next[kNext];
    for (int i = 0; i < kNext; i++) {
      Vec<N> second = v[2 * i + 1 < Count ? 2 * i + 1 : 2 * i];
      next[i] = half_sums<N, Half>(v[2 * i], second, std::make_integer_sequence<int, N>{});
    }
    sum_all<N, kNext, Half / 2>(next, to);
  }
}
#else  // no way to name lanes that both compilers know
template <int N, int Count>
inline void sum_all(const Vec<N>* v, float* to) {
  for (int i = 0; i < Count; i++) to[i] = sum<N>(v[i]);
}
#endif

template <int N>
inline float max(Vec<N> v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    Vec<N / 2> low, high;
    halves<N>(v, low, high);
    return max<N / 2>(low > high ? low : high);
  }
}

// e^x for x <= 88 to about 1 ulp (Cephes' expf: range reduction by ln 2 in two parts, polynomial of degree 5).
// Below -87 it is exactly 0, so that e^-inf masks; NaN stays NaN.
template <int N>
inline Vec<N> exp(Vec<N> x) {
  const Vec<N> round = fill<N>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec<N> n = (x * 1.44269504088896341f + round) - round;
  n = x < -87.f ? fill<N>(0.f) : n;  // keeps the conversion below in range
  Vec<N> r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec<N> p = fill<N>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  typename Types<N>::Int exponent = __builtin_convertvector(n, typename Types<N>::Int);
  Vec<N> power = (Vec<N>)((exponent + 127) << 23);
  return x < -87.f ? fill<N>(0.f) : p * power;
}

}  // namespace lanes
