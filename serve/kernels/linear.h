// Products with weights of 4 or 8 bits, in groups of 32 inputs that share a scale and an offset:
//
//     weight = d * u + m,  0 <= u < 2^bits
//
// Activations are rounded to 8 bits, each group of a row by its own largest value; products are
// summed exactly as integers within a group, and in float from group to group. So what is computed
// for a row depends on that row alone, not on the rows beside it nor on the threads.
//
// An 8-bit weight is two of 4 bits, u = 16 * high + low: products of unsigned 4-bit and signed
// 8-bit numbers can be summed over a group in 16 bits (8 * 2 * 15 * 127 < 2^15), which is what
// vpmaddubsw is fast at, and full 8-bit ones cannot.
//
// Weights lie in tiles of 8 outputs. Of each tile and group: 8 d and 8 m as float16, then the u of
// four inputs ("quad") by eight outputs in 32 bytes: two quads share a vector at 4 bits, the first
// in the low halves, the one four later in the high ones.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace eagleray {

constexpr int kGroup = 32;
constexpr int kTile = 8;
constexpr int kQuads = kGroup / 4;
// Rows whose sums stay in the first-level cache together.
constexpr int kRows = 32;

inline int groups_of(int width) { return (width + kGroup - 1) / kGroup; }

struct FreeAligned {
  void operator()(void* memory) const { std::free(memory); }
};

template <typename T>
using Aligned = std::unique_ptr<T[], FreeAligned>;

template <typename T>
Aligned<T> make_aligned(size_t count) {
  const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return Aligned<T>(static_cast<T*>(memory));
}

// Rows of activations, rounded to 8 bits.
struct QuantizedRows {
  void reserve(int rows, int width) {
    const size_t groups = static_cast<size_t>(groups_of(width));
    if (rows * groups > capacity) {
      capacity = rows * groups;
      values = make_aligned<int8_t>(capacity * kGroup);
      scales = make_aligned<float>(capacity);
      sums = make_aligned<float>(capacity);
    }
  }

  size_t capacity = 0;
  // Row by row and group by group; how many groups a row has is known to who asks.
  Aligned<int8_t> values;
  // Of each row and group: the unit of its values, and their sum in that unit.
  Aligned<float> scales;
  Aligned<float> sums;
};

inline float sum_of(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float max_of(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Rounds a row of `width` floats; what is missing in its last group counts as zero. A group that is
// not finite makes what is computed of it not finite.
inline void quantize_row(const float* x, int width, QuantizedRows& rows, int row) {
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const int num_groups = groups_of(width);
  for (int group = 0; group < num_groups; ++group) {
    const size_t place = static_cast<size_t>(row) * num_groups + group;
    alignas(32) float tail[kGroup] = {};
    const float* from = x + group * kGroup;
    if ((group + 1) * kGroup > width) {
      std::memcpy(tail, from, sizeof(float) * (width - group * kGroup));
      from = tail;
    }
    __m256 parts[4];
    __m256 largest = _mm256_setzero_ps();
    __m256 total = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      parts[i] = _mm256_loadu_ps(from + 8 * i);
      largest = _mm256_max_ps(largest, _mm256_and_ps(parts[i], no_sign));
      total = _mm256_add_ps(total, parts[i]);
    }
    float most = max_of(largest);
    // A maximum may hide NaN, a sum does not.
    if (!std::isfinite(sum_of(total)) || !std::isfinite(most)) most = NAN;
    const float scale = most / 127.0f;
    const __m256 inverse = _mm256_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
    __m256i whole[4];
    __m256i count = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(parts[i], inverse));
      count = _mm256_add_epi32(count, whole[i]);
    }
    const __m256i low = _mm256_packs_epi32(whole[0], whole[1]);
    const __m256i high = _mm256_packs_epi32(whole[2], whole[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(rows.values.get() + place * kGroup), packed);
    rows.scales[place] = scale;
    rows.sums[place] = scale * sum_of(_mm256_cvtepi32_ps(count));
  }
}

class Linear {
 public:
  // Rounds `weights`, [outputs, inputs] row by row, to so many bits.
  Linear(const float* weights, int outputs, int inputs, int bits)
      : outputs_(outputs), inputs_(inputs), bits_(bits), num_groups_(groups_of(inputs)),
        num_tiles_((outputs + kTile - 1) / kTile),
        block_bytes_(kHeaderBytes + (bits == 4 ? 128 : 256)) {
    data_ = make_aligned<uint8_t>(num_bytes());
    for (int tile = 0; tile < num_tiles_; ++tile) {
      for (int group = 0; group < num_groups_; ++group) pack(weights, tile, group);
    }
  }

  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }
  int num_tiles() const { return num_tiles_; }
  size_t num_bytes() const {
    return static_cast<size_t>(num_tiles_) * num_groups_ * block_bytes_;
  }

  // sums[i * kTile + j]: output tile * kTile + j of row first + i, for up to kRows rows.
  void tile(int tile, const QuantizedRows& rows, int first, int count, float* sums) const {
    const uint8_t* block =
        data_.get() + static_cast<size_t>(tile) * num_groups_ * block_bytes_;
    if (bits_ == 4) {
      tile_of_4_bits(block, rows, first, count, sums);
    } else {
      tile_of_8_bits(block, rows, first, count, sums);
    }
  }

  // The weights as they are computed with, [outputs, inputs].
  void dequantize(float* weights) const {
    for (int out = 0; out < outputs_; ++out) {
      for (int in = 0; in < inputs_; ++in) {
        const uint8_t* block = block_of(out / kTile, in / kGroup);
        const int lane = out % kTile;
        const float d = float_of(block + 2 * lane), m = float_of(block + 16 + 2 * lane);
        weights[static_cast<size_t>(out) * inputs_ + in] =
            d * level(block, lane, in % kGroup) + m;
      }
    }
  }

 private:
  static constexpr int kHeaderBytes = 32;

  uint8_t* block_of(int tile, int group) const {
    return data_.get() + (static_cast<size_t>(tile) * num_groups_ + group) * block_bytes_;
  }

  static float float_of(const uint8_t* half) {
    uint16_t bits;
    std::memcpy(&bits, half, 2);
    return _cvtsh_ss(bits);
  }

  static float set_half(uint8_t* place, float value) {
    const uint16_t bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(place, &bits, 2);
    return _cvtsh_ss(bits);
  }

  int level(const uint8_t* block, int lane, int in) const {
    const int quad = in / 4, at = lane * 4 + in % 4;
    if (bits_ == 8) return block[kHeaderBytes + quad * 32 + at];
    const uint8_t both = block[kHeaderBytes + quad % 4 * 32 + at];
    return quad < 4 ? both & 15 : both >> 4;
  }

  void pack(const float* weights, int tile, int group) {
    uint8_t* block = block_of(tile, group);
    const int first = group * kGroup, width = std::min(kGroup, inputs_ - first);
    for (int lane = 0; lane < kTile; ++lane) {
      const int out = tile * kTile + lane;
      if (out >= outputs_) continue;  // zeros
      const float* from = weights + static_cast<size_t>(out) * inputs_ + first;
      float least = from[0], most = from[0];
      for (int i = 1; i < width; ++i) {
        least = std::min(least, from[i]);
        most = std::max(most, from[i]);
      }
      float d, m;
      const int levels = bits_ == 4 ? 15 : 255;
      if (bits_ == 4) {
        d = set_half(block + 2 * lane, (most - least) / 15.0f);
        m = set_half(block + 16 + 2 * lane, least);
      } else {
        d = set_half(block + 2 * lane, std::max(most, -least) / 127.0f);
        m = set_half(block + 16 + 2 * lane, -128.0f * d);
      }
      for (int i = 0; i < width; ++i) {
        const float at = d > 0.0f ? (from[i] - m) / d : 0.0f;
        const int u = static_cast<int>(std::lround(std::clamp(at, 0.0f, float(levels))));
        const int quad = i / 4, byte = lane * 4 + i % 4;
        if (bits_ == 8) {
          block[kHeaderBytes + quad * 32 + byte] = static_cast<uint8_t>(u);
        } else {
          block[kHeaderBytes + quad % 4 * 32 + byte] |=
              static_cast<uint8_t>(quad < 4 ? u : u << 4);
        }
      }
    }
  }

  static __m256i quad_of(const int8_t* values, int quad) {
    int32_t four;
    std::memcpy(&four, values + 4 * quad, 4);
    return _mm256_set1_epi32(four);
  }

  static __m256 halves(const uint8_t* place) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(place)));
  }

  // Where a group of one row after the other lies.
  struct Column {
    Column(const QuantizedRows& rows, int first, int group, int num_groups)
        : stride(num_groups) {
      const size_t place = static_cast<size_t>(first) * num_groups + group;
      values = rows.values.get() + place * kGroup;
      scale = rows.scales.get() + place;
      sum = rows.sums.get() + place;
    }

    void next() {
      values += stride * kGroup;
      scale += stride;
      sum += stride;
    }

    const int8_t* values;
    const float* scale;
    const float* sum;
    const ptrdiff_t stride;
  };

  static void finish(__m256i sum, __m256 d, __m256 m, const Column& column, float* sums) {
    const __m256 scaled = _mm256_mul_ps(d, _mm256_broadcast_ss(column.scale));
    const __m256 before =
        _mm256_fmadd_ps(m, _mm256_broadcast_ss(column.sum), _mm256_load_ps(sums));
    _mm256_store_ps(sums, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scaled, before));
  }

  void tile_of_4_bits(const uint8_t* block, const QuantizedRows& rows, int first, int count,
                      float* sums) const {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    std::memset(sums, 0, sizeof(float) * kTile * count);
    for (int group = 0; group < num_groups_; ++group, block += block_bytes_) {
      const __m256 d = halves(block), m = halves(block + 16);
      __m256i w[kQuads];
      for (int i = 0; i < 4; ++i) {
        const __m256i both = _mm256_load_si256(
            reinterpret_cast<const __m256i*>(block + kHeaderBytes + 32 * i));
        w[i] = _mm256_and_si256(both, low);
        w[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      }
      Column column(rows, first, group, num_groups_);
      for (int row = 0; row < count; ++row, column.next()) {
        const int8_t* values = column.values;
        __m256i even = _mm256_maddubs_epi16(w[0], quad_of(values, 0));
        __m256i odd = _mm256_maddubs_epi16(w[1], quad_of(values, 1));
        for (int i = 2; i < kQuads; i += 2) {
          even = _mm256_add_epi16(even, _mm256_maddubs_epi16(w[i], quad_of(values, i)));
          odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(w[i + 1], quad_of(values, i + 1)));
        }
        const __m256i sum = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
        finish(sum, d, m, column, sums + row * kTile);
      }
    }
  }

  void tile_of_8_bits(const uint8_t* block, const QuantizedRows& rows, int first, int count,
                      float* sums) const {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    alignas(32) int32_t halfway[kRows * kTile];
    std::memset(sums, 0, sizeof(float) * kTile * count);
    for (int group = 0; group < num_groups_; ++group, block += block_bytes_) {
      const __m256 d = halves(block), m = halves(block + 16);
      // Eight vectors at a time, or they would not stay in registers.
      for (int half = 0; half < 2; ++half) {
        __m256i lows[4], highs[4];
        for (int i = 0; i < 4; ++i) {
          const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(
              block + kHeaderBytes + 32 * (4 * half + i)));
          lows[i] = _mm256_and_si256(both, low);
          highs[i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        Column column(rows, first, group, num_groups_);
        for (int row = 0; row < count; ++row, column.next()) {
          const int8_t* values = column.values + 16 * half;
          const __m256i first_quad = quad_of(values, 0);
          __m256i small = _mm256_maddubs_epi16(lows[0], first_quad);
          __m256i large = _mm256_maddubs_epi16(highs[0], first_quad);
          for (int i = 1; i < 4; ++i) {
            const __m256i quad = quad_of(values, i);
            small = _mm256_add_epi16(small, _mm256_maddubs_epi16(lows[i], quad));
            large = _mm256_add_epi16(large, _mm256_maddubs_epi16(highs[i], quad));
          }
          __m256i sum = _mm256_add_epi32(
              _mm256_madd_epi16(small, ones), _mm256_madd_epi16(large, sixteens));
          __m256i* kept = reinterpret_cast<__m256i*>(halfway + row * kTile);
          if (half == 0) {
            _mm256_store_si256(kept, sum);
          } else {
            sum = _mm256_add_epi32(sum, _mm256_load_si256(kept));
            finish(sum, d, m, column, sums + row * kTile);
          }
        }
      }
    }
  }

  int outputs_, inputs_, bits_, num_groups_, num_tiles_, block_bytes_;
  Aligned<uint8_t> data_;
};

}  // namespace eagleray
