// Row-wise operations between the matrix products: norms, the gated activation, rotary embedding with the KV store.
// Intermediate values are rounded to the storage type where the torch reference rounds them.
//
// A row's result depends on the row alone: it is one function for any number of rows, and no sum is left to the
// compiler's order.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "vector.h"

namespace sluice {
namespace {

template <class T>
void normalise(T* out, const T* x, const T* weight, int64_t size, float eps) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = narrow<T>(rounded<T>(widen(x[i]) * scale) * widen(weight[i]));
}

template <class T>
void add(T* sum, const T* x, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) sum[i] = narrow<T>(widen(sum[i]) + widen(x[i]));
}

constexpr float TWO_ROOT_TWO_OVER_PI = 1.5957691216057308f;  // GELU by tanh is x times the sigmoid of a polynomial

template <bool gelu, class T>
void gate(T* out, const T* gate_up, int64_t size) {
    const T* up = gate_up + size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
        const float x = widen(gate_up[i]);
        const float slope = gelu ? TWO_ROOT_TWO_OVER_PI * (x + 0.044715f * x * x * x) : x;
        out[i] = narrow<T>(rounded<T>(x / (1.0f + exponential(-slope))) * widen(up[i]));
    }
}

template <class T>
void rotate(T* out, const T* x, const float* cos, const float* sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float first = widen(x[i]), second = widen(x[i + half]);
        out[i] = narrow<T>(first * cos[i] - second * sin[i]);
        out[i + half] = narrow<T>(second * cos[i] + first * sin[i]);
    }
}

struct Heads {
    int64_t queries, keys, dim;
};

struct Cache {
    void *k, *v;
    int64_t block_stride, head_stride, block_size;
};

constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t PARALLEL_FROM = 1 << 15;  // elements that are worth waking threads for

inline int team(int64_t elements, int threads) { return elements < PARALLEL_FROM ? 1 : threads; }

// One token: its row of qkv to the rotated queries and, unless it is negative, to its slot of the cache.
template <class T>
void rope_and_store(
    T* q_out, const T* qkv, const float* cos_sin, const T* q_norm, const T* k_norm, float eps, Heads heads, Cache cache,
    int64_t slot) {
    T normed[MAX_HEAD_DIM];
    const int64_t dim = heads.dim, half = dim / 2;
    const auto rotated = [&](T* out, const T* x, const T* norm) {
        if (norm != nullptr) {
            normalise(normed, x, norm, dim, eps);
            x = normed;
        }
        rotate(out, x, cos_sin, cos_sin + half, half);
    };
    for (int64_t h = 0; h < heads.queries; ++h) rotated(q_out + h * dim, qkv + h * dim, q_norm);
    if (slot < 0) return;

    const T* k = qkv + heads.queries * dim;
    const T* v = k + heads.keys * dim;
    const int64_t token = slot / cache.block_size * cache.block_stride + slot % cache.block_size * dim;
    for (int64_t h = 0; h < heads.keys; ++h) {
        const int64_t place = token + h * cache.head_stride;
        rotated(static_cast<T*>(cache.k) + place, k + h * dim, k_norm);
        T* v_out = static_cast<T*>(cache.v) + place;
        for (int64_t i = 0; i < dim; ++i) v_out[i] = v[h * dim + i];
    }
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

void sluice_rms_norm(
    int dtype, void* out, const void* x, const void* weight, int64_t rows, int64_t size, float eps, int threads) {
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        parallel_for(rows, team(rows * size, threads), [&](int64_t row) {
            normalise((T*)out + row * size, (const T*)x + row * size, (const T*)weight, size, eps);
        });
    });
}

void sluice_add_rms_norm(
    int dtype, void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t size, float eps,
    int threads) {
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        parallel_for(rows, team(rows * size, threads), [&](int64_t row) {
            T* sum = (T*)residual + row * size;
            add(sum, (const T*)x + row * size, size);
            normalise((T*)out + row * size, sum, (const T*)weight, size, eps);
        });
    });
}

void sluice_gate(int dtype, void* out, const void* gate_up, int64_t rows, int64_t size, int gelu, int threads) {
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        parallel_for(rows, team(2 * rows * size, threads), [&](int64_t row) {
            T* to = (T*)out + row * size;
            const T* from = (const T*)gate_up + row * 2 * size;
            gelu ? gate<true>(to, from, size) : gate<false>(to, from, size);
        });
    });
}

void sluice_rope_and_store(
    int dtype, void* q_out, const void* qkv, const float* cos_sin, const void* q_norm, const void* k_norm, float eps,
    void* k_cache, void* v_cache, int64_t block_stride, int64_t head_stride, int64_t block_size,
    const int64_t* positions, const int64_t* slot_mapping, int64_t tokens, int64_t num_heads, int64_t num_kv_heads,
    int64_t dim, int threads) {
    const Heads heads{num_heads, num_kv_heads, dim};
    const Cache cache{k_cache, v_cache, block_stride, head_stride, block_size};
    const int64_t width = (num_heads + 2 * num_kv_heads) * dim;
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        parallel_for(tokens, team(tokens * width, threads), [&](int64_t t) {
            rope_and_store(
                (T*)q_out + t * num_heads * dim, (const T*)qkv + t * width,
                cos_sin + positions[t] * dim, (const T*)q_norm, (const T*)k_norm, eps, heads, cache, slot_mapping[t]);
        });
    });
}

}  // extern "C"
