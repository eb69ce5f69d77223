// Masks of tokens on logits, a word of 32 tokens at a time: most masks allow next to nothing or next to everything.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels.h"
#include "storage.h"

namespace sluice {
namespace {

constexpr float IMPOSSIBLE = -std::numeric_limits<float>::infinity();
constexpr int64_t BITS = 32;
constexpr int64_t PARALLEL_FROM = 1 << 20;  // logits that are worth waking threads for

struct SingleBits {
    uint32_t of[BITS];
    constexpr SingleBits() : of() {
        for (int i = 0; i < BITS; ++i) of[i] = uint32_t(1) << i;
    }
};
constexpr SingleBits BIT;

inline void mask_word(float* logits, uint32_t word) {
#pragma omp simd
    for (int i = 0; i < BITS; ++i) logits[i] = word & BIT.of[i] ? logits[i] : IMPOSSIBLE;
}

void mask_row(float* logits, const uint32_t* bitmask, int64_t words, int64_t vocab) {
    const int64_t whole = std::min(words, vocab / BITS);
    int64_t w = 0;
    while (w < whole) {
        if (bitmask[w] == ~uint32_t(0)) {
            ++w;
        } else if (bitmask[w] == 0) {
            const int64_t first = w;
            while (w < whole && bitmask[w] == 0) ++w;
            std::fill(logits + first * BITS, logits + w * BITS, IMPOSSIBLE);
        } else {
            mask_word(logits + w * BITS, bitmask[w]);
            ++w;
        }
    }
    for (int64_t token = whole * BITS; token < vocab; ++token) {
        if (token >= words * BITS || !(bitmask[token / BITS] & BIT.of[token % BITS])) logits[token] = IMPOSSIBLE;
    }
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

void sluice_apply_token_bitmask(
    float* logits, int64_t row_stride, const uint32_t* bitmasks, int64_t words, const int32_t* indices, int64_t rows,
    int64_t vocab, int threads) {
    parallel_for(rows, rows * vocab < PARALLEL_FROM ? 1 : threads, [&](int64_t row) {
        if (indices[row] >= 0) mask_row(logits + row * row_stride, bitmasks + indices[row] * words, words, vocab);
    });
}

}  // extern "C"
