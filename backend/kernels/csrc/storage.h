// Storage types of tensors, and the arithmetic type: everything is computed in fp32 and rounded to nearest even.
#pragma once

#include <cstdint>

namespace sluice {

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return as_float(uint32_t(value.bits) << 16); }

inline float widen(Float16 value) {
    const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    const float scaled = as_float(magnitude) * 0x1p112f;  // rebias the exponent; subnormals come out right
    const uint32_t finite = as_bits(scaled);
    const uint32_t special = magnitude | 0x7f800000;
    return as_float((magnitude >= 0x0f800000 ? special : finite) | sign);
}

template <class T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}

template <>
inline Float16 narrow<Float16>(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 puts the last bit of a half subnormal into the last bit of the sum.
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return {uint16_t((magnitude >= 0x477ff000 ? special : finite) | sign)};
}

// The value as the tensor would hold it.
template <class T>
inline float rounded(float value) {
    return widen(narrow<T>(value));
}

// a * b + c, rounded once where the processor does that in one instruction.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x to about 2 units in the last place; 0 below -87.3, infinity above 88.4. No branches: loops over it vectorise.
inline float exponential(float x) {
    const float bounded = x < -87.3f ? -87.3f : (x > 89.0f ? 89.0f : x);
    const float magic = 0x1.8p23f;
    const float n = fused(bounded, 1.44269504f, magic) - magic;
    const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, bounded));
    float poly = 1.9875691500e-4f;
    poly = fused(poly, r, 1.3981999507e-3f);
    poly = fused(poly, r, 8.3334519073e-3f);
    poly = fused(poly, r, 4.1665795894e-2f);
    poly = fused(poly, r, 1.6666665459e-1f);
    poly = fused(poly, r, 5.0000001201e-1f);
    const float fraction = fused(poly * r, r, r) + 1.0f;
    const float scale = as_float(uint32_t(int32_t(n) + 127) << 23);
    return x < -87.3f ? 0.0f : fraction * scale;
}

// Calls `visit` with a null pointer of the storage type that `dtype` names.
template <class Visit>
void with_storage(int dtype, Visit visit) {
    if (dtype == FLOAT32) {
        visit(static_cast<float*>(nullptr));
    } else if (dtype == BFLOAT16) {
        visit(static_cast<BFloat16*>(nullptr));
    } else {
        visit(static_cast<Float16*>(nullptr));
    }
}

// Calls `body(i)` for i in [0, count), over `threads` threads when that is more than one.
template <class Body>
void parallel_for(int64_t count, int threads, Body body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace sluice
