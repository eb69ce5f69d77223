// One SIMD register of fp32, by the compiler's vector extension: AVX-512, AVX2, NEON or SSE from the same source.
#pragma once

#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "storage.h"

namespace sluice {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(LANES * 2)));

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const BFloat16* p) {
    HalfBits half;
    std::memcpy(&half, p, sizeof half);
    return (Vec)(__builtin_convertvector(half, Bits) << 16);
}

inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = widen(p[i]);
    return load(wide);
#endif
}

// Compilers take the vector extension's conversion apart.
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    float wide[LANES];
    for (int i = 0; i < LANES; ++i) wide[i] = p[i];
    return load(wide);
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(BFloat16* p, Vec v) {
    for (int i = 0; i < LANES; ++i) p[i] = narrow<BFloat16>(v[i]);
}

inline void store(Float16* p, Vec v) {
    for (int i = 0; i < LANES; ++i) p[i] = narrow<Float16>(v[i]);
}

inline Vec spread(float value) { return value - Vec{}; }

// a * b + c of each lane, as `fused` of one.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// sum + a * b of the two integers in each lane, which must not overflow.
inline Ints dot(Shorts a, Shorts b, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Lanes of (a, b) chosen by index: 0 to LANES - 1 from a, the rest from b.
template <uint32_t... lane>
inline Vec pick(Vec a, Vec b, std::integer_sequence<uint32_t, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, int(lane)...);
#else
    return __builtin_shuffle(a, b, Bits{lane...});
#endif
}

// The lanes of a and b in turns of `width`, each turn's first half (`part` 0) or second half (`part` 1).
template <uint32_t width, uint32_t part, uint32_t... i>
constexpr auto turns(std::integer_sequence<uint32_t, i...>) {
    return std::integer_sequence<uint32_t, (i & ~(2 * width - 1)) + part * width + (i & (width - 1)) +
                                               (i & width ? LANES : 0)...>{};
}

template <uint32_t width>
inline Vec fold(Vec a, Vec b) {
    constexpr auto lanes = std::make_integer_sequence<uint32_t, LANES>{};
    return pick(a, b, turns<width, 0>(lanes)) + pick(a, b, turns<width, 1>(lanes));
}

// Lane i of the result is the sum of the lanes of v[i]; v is used up.
template <uint32_t width = 1>
inline Vec sums(Vec* v) {
    if constexpr (width == LANES) {
        return v[0];
    } else {
        for (uint32_t i = 0; i < LANES / width; i += 2) v[i / 2] = fold<width>(v[i], v[i + 1]);
        return sums<2 * width>(v);
    }
}

// Calls `body` with 0 to count - 1 as constants.
template <int count, class Body>
inline void unrolled(Body body) {
    if constexpr (count > 1) unrolled<count - 1>(body);
    body(std::integral_constant<int, count - 1>{});
}

// The sum of the lanes, first to last.
inline float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

// The sum of squares in an order that depends on `size` alone.
template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
    Vec acc[4] = {};  // so that additions do not wait for each other
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        for (int v = 0; v < 4; ++v) {
            const Vec part = load(x + i + v * LANES);
            acc[v] = fused(part, part, acc[v]);
        }
    }
    float total = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; i < size; ++i) total = fused(widen(x[i]), widen(x[i]), total);
    return total;
}

}  // namespace sluice
