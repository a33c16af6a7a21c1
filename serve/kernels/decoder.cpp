// A step of the decoder: tokens of all requests in, logits of those that sample out.
//
// The model is that of platform/model/decoder.py. Linear layers are those of linear.h; all else is
// in float32, keys and values in float32 or float16. One call computes a whole step, by a team of
// threads. What is computed for a token depends on its request's tokens alone, so greedy output
// does not change with the batch, the chunks of a prompt, reused blocks or preemption.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "team.h"

using eagleray::Aligned;
using eagleray::Half;
using eagleray::Linear;
using eagleray::Pages;
using eagleray::QuantizedRows;
using eagleray::Team;
using eagleray::kRows;
using eagleray::kTile;

extern "C" {

struct ErConfig {
  int32_t dim, num_layers, num_heads, num_kv_heads, head_dim, ffn_dim, vocab_size, max_seq_len;
  float norm_eps;
  int32_t is_half_cache, block_tokens, num_threads;
};

// Pointers to float32 that stay valid as long as the model.
struct ErLayer {
  const float *input_norm, *post_norm;
  const Linear *qkv, *out, *gate, *up, *down;
};

// One step. Rows are tokens; each belongs to a request, whose blocks are a row of `tables`.
struct ErBatch {
  int32_t num_tokens, num_sampled, num_requests, table_width, num_blocks;
  const int32_t *tokens, *positions, *requests, *tables, *sampled;
  void *keys, *values;  // [num_layers, num_blocks, block_tokens, num_kv_heads, head_dim]
  int64_t layer_stride;
  float* logits;  // [num_sampled, vocab_size]
  int32_t* likeliest;  // [num_sampled]; -1 where the logits are not finite
};
}

namespace {

constexpr int kTilesPerTask = 4;

float* grown(Aligned<float>& memory, size_t& capacity, size_t count) {
  if (count > capacity) {
    memory = eagleray::make_aligned<float>(count);
    capacity = count;
  }
  return memory.get();
}

struct Buffer {
  float* reserve(size_t count) { return grown(memory, capacity, count); }
  Aligned<float> memory;
  size_t capacity = 0;
};

__m256 silu(__m256 x) {
  // 1 / (1 + e^-x), of e^-|x| so that nothing overflows.
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 e = eagleray::exp8(_mm256_or_ps(x, sign));
  const __m256 numerator = _mm256_blendv_ps(one, e, x);  // by the sign of x
  return _mm256_div_ps(_mm256_mul_ps(x, numerator), _mm256_add_ps(one, e));
}

void rms_norm(const float* x, const float* weight, int dim, float eps, float* out) {
  __m256 squares = _mm256_setzero_ps();
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    const __m256 part = _mm256_loadu_ps(x + i);
    squares = _mm256_fmadd_ps(part, part, squares);
  }
  float sum = eagleray::sum_of(squares);
  for (; i < dim; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
  for (i = 0; i < dim; ++i) out[i] = x[i] * factor * weight[i];
}

class Model {
 public:
  Model(const ErConfig& config, const float* embedding, const float* cos, const float* sin,
        const ErLayer* layers, const float* final_norm, const Linear* head)
      : config_(config), embedding_(embedding), cos_(cos), sin_(sin),
        layers_(layers, layers + config.num_layers), final_norm_(final_norm), head_(head),
        team_(config.num_threads), scratch_(team_.size()) {}

  // Whether it was computed; not if a token, position or block is out of range.
  bool step(const ErBatch& batch) {
    if (!is_valid(batch)) return false;
    if (config_.is_half_cache) {
      run<Half>(batch);
    } else {
      run<float>(batch);
    }
    return true;
  }

 private:
  struct Scratch {
    alignas(64) float sums[kRows * kTile];
    alignas(64) float more_sums[kRows * kTile];
    Buffer row, scores;
  };

  bool is_valid(const ErBatch& batch) const {
    if (batch.num_tokens < 1 || batch.num_sampled < 0) return false;
    // Rounded rows have room for as many.
    if (batch.num_sampled > batch.num_tokens) return false;
    for (int row = 0; row < batch.num_tokens; ++row) {
      const int position = batch.positions[row];
      if (batch.tokens[row] < 0 || batch.tokens[row] >= config_.vocab_size) return false;
      if (position < 0 || position >= config_.max_seq_len) return false;
      if (batch.requests[row] < 0 || batch.requests[row] >= batch.num_requests) return false;
      if (position / config_.block_tokens >= batch.table_width) return false;
      const int32_t* table = table_of(batch, row);
      for (int i = 0; i <= position / config_.block_tokens; ++i) {
        if (table[i] < 0 || table[i] >= batch.num_blocks) return false;
      }
    }
    for (int i = 0; i < batch.num_sampled; ++i) {
      if (batch.sampled[i] < 0 || batch.sampled[i] >= batch.num_tokens) return false;
    }
    return true;
  }

  template <typename T>
  void run(const ErBatch& batch) {
    const size_t rows = batch.num_tokens, dim = config_.dim;
    const size_t width = static_cast<size_t>(config_.num_heads) * config_.head_dim;
    x_.reserve(rows * dim);
    qkv_.reserve(rows * qkv_width());
    mixed_.reserve(rows * width);
    hidden_.reserve(rows * config_.ffn_dim);
    const int widest = std::max({config_.dim, static_cast<int>(width), config_.ffn_dim});
    rounded_.reserve(batch.num_tokens, widest);
    int longest = 0;
    for (size_t row = 0; row < rows; ++row) longest = std::max(longest, batch.positions[row] + 1);
    for (Scratch& scratch : scratch_) {
      scratch.row.reserve(std::max(widest, qkv_width()));
      scratch.scores.reserve(longest + 8);
    }
    team_.run([&](int thread) { pass<T>(batch, scratch_[thread]); });
  }

  // What every thread does.
  template <typename T>
  void pass(const ErBatch& batch, Scratch& scratch) {
    const int rows = batch.num_tokens, dim = config_.dim;
    float* x = x_.memory.get();
    team_.each(rows, [&](int row) {
      std::memcpy(x + static_cast<size_t>(row) * dim,
                  embedding_ + static_cast<size_t>(batch.tokens[row]) * dim, sizeof(float) * dim);
    });
    for (int index = 0; index < config_.num_layers; ++index) {
      const ErLayer& layer = layers_[index];
      T* keys = static_cast<T*>(batch.keys) + index * batch.layer_stride;
      T* values = static_cast<T*>(batch.values) + index * batch.layer_stride;
      normed(layer.input_norm, rows, scratch);
      product(*layer.qkv, rows, scratch, qkv_.memory.get(), false);
      team_.each(rows, [&](int row) { keep<T>(batch, row, keys, values); });
      team_.each(rows * config_.num_kv_heads, [&](int task) {
        attention<T>(batch, task / config_.num_kv_heads, task % config_.num_kv_heads, keys, values,
                     scratch);
      });
      rounded(mixed_.memory.get(), config_.num_heads * config_.head_dim, rows);
      product(*layer.out, rows, scratch, x, true);
      normed(layer.post_norm, rows, scratch);
      gated(*layer.gate, *layer.up, rows, scratch);
      rounded(hidden_.memory.get(), config_.ffn_dim, rows);
      product(*layer.down, rows, scratch, x, true);
    }
    head(batch, scratch);
  }

  int qkv_width() const { return (config_.num_heads + 2 * config_.num_kv_heads) * config_.head_dim; }

  // rounded_ = norm(x)
  void normed(const float* weight, int rows, Scratch& scratch) {
    team_.each(rows, [&](int row) {
      const float* x = x_.memory.get() + static_cast<size_t>(row) * config_.dim;
      rms_norm(x, weight, config_.dim, config_.norm_eps, scratch.row.memory.get());
      eagleray::quantize_row(scratch.row.memory.get(), config_.dim, rounded_, row);
    });
  }

  void rounded(const float* from, int width, int rows) {
    team_.each(rows, [&](int row) {
      eagleray::quantize_row(from + static_cast<size_t>(row) * width, width, rounded_, row);
    });
  }

  // out (+)= rounded_ * weights
  void product(const Linear& linear, int rows, Scratch& scratch, float* out, bool is_added) {
    const int tasks = (linear.num_tiles() + kTilesPerTask - 1) / kTilesPerTask;
    const int width = linear.outputs();
    team_.each(tasks, [&](int task) {
      const int last = std::min(linear.num_tiles(), (task + 1) * kTilesPerTask);
      for (int first = 0; first < rows; first += kRows) {
        const int count = std::min(kRows, rows - first);
        for (int tile = task * kTilesPerTask; tile < last; ++tile) {
          linear.tile(tile, rounded_, first, count, scratch.sums);
          const int lanes = std::min(kTile, width - tile * kTile);
          for (int i = 0; i < count; ++i) {
            float* to = out + static_cast<size_t>(first + i) * width + tile * kTile;
            const float* from = scratch.sums + i * kTile;
            for (int lane = 0; lane < lanes; ++lane) {
              to[lane] = is_added ? to[lane] + from[lane] : from[lane];
            }
          }
        }
      }
    });
  }

  // hidden_ = silu(rounded_ * gate) * (rounded_ * up)
  void gated(const Linear& gate, const Linear& up, int rows, Scratch& scratch) {
    const int tasks = (gate.num_tiles() + kTilesPerTask - 1) / kTilesPerTask;
    const int width = config_.ffn_dim;
    team_.each(tasks, [&](int task) {
      const int last = std::min(gate.num_tiles(), (task + 1) * kTilesPerTask);
      for (int first = 0; first < rows; first += kRows) {
        const int count = std::min(kRows, rows - first);
        for (int tile = task * kTilesPerTask; tile < last; ++tile) {
          gate.tile(tile, rounded_, first, count, scratch.sums);
          up.tile(tile, rounded_, first, count, scratch.more_sums);
          const int lanes = std::min(kTile, width - tile * kTile);
          for (int i = 0; i < count; ++i) {
            const __m256 product =
                _mm256_mul_ps(silu(_mm256_load_ps(scratch.sums + i * kTile)),
                              _mm256_load_ps(scratch.more_sums + i * kTile));
            alignas(32) float done[kTile];
            _mm256_store_ps(done, product);
            std::memcpy(hidden_.memory.get() + static_cast<size_t>(first + i) * width +
                            tile * kTile,
                        done, sizeof(float) * lanes);
          }
        }
      }
    });
  }

  // Rotates queries and keys of a row, and keeps its keys and values.
  template <typename T>
  void keep(const ErBatch& batch, int row, T* keys, T* values) {
    const int channels = config_.head_dim, position = batch.positions[row];
    const int heads = config_.num_heads, kv_heads = config_.num_kv_heads;
    const float* cos = cos_ + static_cast<size_t>(position) * channels;
    const float* sin = sin_ + static_cast<size_t>(position) * channels;
    float* q = qkv_.memory.get() + static_cast<size_t>(row) * qkv_width();
    const float scale = 1.0f / std::sqrt(static_cast<float>(channels));
    for (int head = 0; head < heads; ++head) turn(q + head * channels, cos, sin, scale);
    float* k = q + heads * channels;
    const float* v = k + kv_heads * channels;
    const size_t stride = static_cast<size_t>(kv_heads) * channels;
    const Pages<T> pages{keys, table_of(batch, row), config_.block_tokens, stride};
    const size_t offset = pages.token(position) - keys;
    for (int head = 0; head < kv_heads; ++head) turn(k + head * channels, cos, sin, 1.0f);
    for (size_t i = 0; i < stride; i += 8) {
      eagleray::store8(keys + offset + i, _mm256_loadu_ps(k + i));
      eagleray::store8(values + offset + i, _mm256_loadu_ps(v + i));
    }
  }

  // Each pair (i, i + C/2) by its position's angle; the first half of the sines is negated.
  void turn(float* x, const float* cos, const float* sin, float factor) const {
    const int half = config_.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const float low = x[i], high = x[i + half];
      x[i] = (low * cos[i] + high * sin[i]) * factor;
      x[i + half] = (high * cos[i + half] + low * sin[i + half]) * factor;
    }
  }

  const int32_t* table_of(const ErBatch& batch, int row) const {
    return batch.tables + static_cast<size_t>(batch.requests[row]) * batch.table_width;
  }

  template <typename T>
  void attention(const ErBatch& batch, int row, int kv_head, const T* keys, const T* values,
                 Scratch& scratch) {
    const int channels = config_.head_dim, per_kv = config_.num_heads / config_.num_kv_heads;
    const size_t stride = static_cast<size_t>(config_.num_kv_heads) * channels;
    const int32_t* table = table_of(batch, row);
    const Pages<T> k{keys + kv_head * channels, table, config_.block_tokens, stride};
    const Pages<T> v{values + kv_head * channels, table, config_.block_tokens, stride};
    const int length = batch.positions[row] + 1;
    for (int head = kv_head * per_kv; head < (kv_head + 1) * per_kv; ++head) {
      const float* query =
          qkv_.memory.get() + static_cast<size_t>(row) * qkv_width() + head * channels;
      float* out = mixed_.memory.get() +
                   (static_cast<size_t>(row) * config_.num_heads + head) * channels;
      float* scores = scratch.scores.memory.get();
      switch (channels / 8) {
        case 1: eagleray::attend<1>(query, k, v, length, scores, out); break;
        case 2: eagleray::attend<2>(query, k, v, length, scores, out); break;
        case 4: eagleray::attend<4>(query, k, v, length, scores, out); break;
        case 8: eagleray::attend<8>(query, k, v, length, scores, out); break;
        case 12: eagleray::attend<12>(query, k, v, length, scores, out); break;
        case 16: eagleray::attend<16>(query, k, v, length, scores, out); break;
      }
    }
  }

  void head(const ErBatch& batch, Scratch& scratch) {
    team_.each(batch.num_sampled, [&](int i) {
      const float* x =
          x_.memory.get() + static_cast<size_t>(batch.sampled[i]) * config_.dim;
      rms_norm(x, final_norm_, config_.dim, config_.norm_eps, scratch.row.memory.get());
      eagleray::quantize_row(scratch.row.memory.get(), config_.dim, rounded_, i);
    });
    if (!batch.num_sampled) return;
    product(*head_, batch.num_sampled, scratch, batch.logits, false);
    team_.each(batch.num_sampled, [&](int i) {
      const size_t vocab = config_.vocab_size;
      batch.likeliest[i] = likeliest(batch.logits + i * vocab, config_.vocab_size);
    });
  }

  // The first of the largest; -1 if one is not finite.
  static int likeliest(const float* logits, int count) {
    const __m256 zero = _mm256_setzero_ps();
    __m256 largest = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
    __m256 spoilt = zero;  // x * 0 is 0 unless x is not finite
    int i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256 x = _mm256_loadu_ps(logits + i);
      largest = _mm256_max_ps(largest, x);
      spoilt = _mm256_add_ps(spoilt, _mm256_mul_ps(x, zero));
    }
    float most = eagleray::max_of(largest), rest = eagleray::sum_of(spoilt);
    for (; i < count; ++i) {
      most = std::max(most, logits[i]);
      rest += logits[i] * 0.0f;
    }
    if (rest != 0.0f || std::isnan(rest)) return -1;
    return static_cast<int>(std::find(logits, logits + count, most) - logits);
  }

  const ErConfig config_;
  const float *embedding_, *cos_, *sin_;
  const std::vector<ErLayer> layers_;
  const float* final_norm_;
  const Linear* head_;
  Team team_;
  std::vector<Scratch> scratch_;
  Buffer x_, qkv_, mixed_, hidden_;
  QuantizedRows rounded_;
};

}  // namespace

extern "C" {

#define ER_API __attribute__((visibility("default")))

ER_API int er_is_supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Null where memory is short, as all that make something.
ER_API void* er_linear_new(const float* weights, int outputs, int inputs, int bits) {
  try {
    return new Linear(weights, outputs, inputs, bits);
  } catch (const std::exception&) {
    return nullptr;
  }
}

ER_API void er_linear_free(void* linear) { delete static_cast<Linear*>(linear); }

ER_API int64_t er_linear_bytes(const void* linear) {
  return static_cast<int64_t>(static_cast<const Linear*>(linear)->num_bytes());
}

ER_API void er_linear_weights(const void* linear, float* weights) {
  static_cast<const Linear*>(linear)->dequantize(weights);
}

// out[r, o] of `rows` rows x[r, i].
ER_API int er_linear_apply(const void* linear, const float* x, int rows, float* out) {
  try {
    const Linear& weights = *static_cast<const Linear*>(linear);
    QuantizedRows rounded;
    rounded.reserve(rows, weights.inputs());
    for (int row = 0; row < rows; ++row) {
      eagleray::quantize_row(x + static_cast<size_t>(row) * weights.inputs(), weights.inputs(),
                             rounded, row);
    }
    alignas(64) float sums[kRows * kTile];
    for (int first = 0; first < rows; first += kRows) {
      const int count = std::min(kRows, rows - first);
      for (int tile = 0; tile < weights.num_tiles(); ++tile) {
        weights.tile(tile, rounded, first, count, sums);
        const int lanes = std::min(kTile, weights.outputs() - tile * kTile);
        for (int i = 0; i < count; ++i) {
          std::memcpy(out + static_cast<size_t>(first + i) * weights.outputs() + tile * kTile,
                      sums + i * kTile, sizeof(float) * lanes);
        }
      }
    }
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}

ER_API void* er_model_new(const ErConfig* config, const float* embedding, const float* cos,
                          const float* sin, const ErLayer* layers, const float* final_norm,
                          const void* head) {
  try {
    return new Model(*config, embedding, cos, sin, layers, final_norm,
                     static_cast<const Linear*>(head));
  } catch (const std::exception&) {
    return nullptr;
  }
}

ER_API void er_model_free(void* model) { delete static_cast<Model*>(model); }

// 0: computed; 1: a token, position or row is out of range; 2: memory is short.
ER_API int er_step(void* model, const ErBatch* batch) {
  try {
    return static_cast<Model*>(model)->step(*batch) ? 0 : 1;
  } catch (const std::exception&) {
    return 2;
  }
}
}
