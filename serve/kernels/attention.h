// Attention of one token over the keys and values of its request, where they lie in their blocks.
//
// What is computed for a token depends on its request's tokens alone: neither on the blocks that
// they lie in, nor on what else the step computes, nor on how a prompt was cut into chunks.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "linear.h"

namespace eagleray {

struct Half {
  uint16_t bits;
};

inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store8(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void store8(Half* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// e^x for x <= 0, relative error below 2e-7: 2^n times a polynomial (Cephes, expf).
inline __m256 exp8(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-87.3f));
  const __m256 n = _mm256_round_ps(
      _mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 y = _mm256_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                        5.0000001201e-1f}) {
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
  }
  y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  const __m256i power = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

// Eight vectors -> the sum of each.
inline __m256 sums_of(const __m256 (&x)[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Where keys (or values) of a layer lie: slot s of block n at (n * block_tokens + s) * stride.
template <typename T>
struct Pages {
  const T* first;
  const int32_t* table;
  int block_tokens;
  size_t stride;

  const T* token(int t) const {
    return first +
           (static_cast<size_t>(table[t / block_tokens]) * block_tokens + t % block_tokens) *
               stride;
  }
};

// One query head of `V` vectors of 8 channels over the first `length` tokens.
//
// `query` is scaled already; `scores` has room for `length` rounded up to 8.
template <int V, typename T>
void attend(const float* query, const Pages<T>& keys, const Pages<T>& values, int length,
            float* scores, float* out) {
  __m256 q[V];
  for (int i = 0; i < V; ++i) q[i] = load8(query + 8 * i);
  __m256 largest = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int t = 0; t < length; t += 8) {
    __m256 parts[8];
    for (int i = 0; i < 8; ++i) {
      const T* key = keys.token(std::min(t + i, length - 1));
      __m256 even = _mm256_mul_ps(q[0], load8(key));
      __m256 odd = _mm256_setzero_ps();
      for (int v = 1; v < V; ++v) {
        (v % 2 ? odd : even) = _mm256_fmadd_ps(q[v], load8(key + 8 * v), v % 2 ? odd : even);
      }
      parts[i] = _mm256_add_ps(even, odd);
    }
    __m256 score = sums_of(parts);
    const __m256i is_inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(length - t), lanes);
    score = _mm256_blendv_ps(_mm256_set1_ps(-std::numeric_limits<float>::infinity()), score,
                             _mm256_castsi256_ps(is_inside));
    _mm256_storeu_ps(scores + t, score);
    largest = _mm256_max_ps(largest, score);
  }
  const __m256 most = _mm256_set1_ps(max_of(largest));
  __m256 total = _mm256_setzero_ps();
  for (int t = 0; t < length; t += 8) {
    const __m256 score = _mm256_loadu_ps(scores + t);
    const __m256i is_inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(length - t), lanes);
    const __m256 weight =
        _mm256_and_ps(exp8(_mm256_sub_ps(score, most)), _mm256_castsi256_ps(is_inside));
    _mm256_storeu_ps(scores + t, weight);
    total = _mm256_add_ps(total, weight);
  }
  __m256 sum[V];
  for (int v = 0; v < V; ++v) sum[v] = _mm256_setzero_ps();
  for (int t = 0; t < length; ++t) {
    const T* value = values.token(t);
    const __m256 weight = _mm256_set1_ps(scores[t]);
    for (int v = 0; v < V; ++v) sum[v] = _mm256_fmadd_ps(weight, load8(value + 8 * v), sum[v]);
  }
  const __m256 norm = _mm256_set1_ps(1.0f / sum_of(total));
  for (int v = 0; v < V; ++v) store8(out + 8 * v, _mm256_mul_ps(sum[v], norm));
}

}  // namespace eagleray
