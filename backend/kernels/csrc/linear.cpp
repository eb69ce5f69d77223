// Products with weights that never change: x @ weight.T + bias, for any number of rows.
//
// A number of the result is one chain of multiplications and additions in fp32, from the first input to the last, then
// the bias. With weights of 4 or 8 bits a link of the chain is a group of inputs: these are rounded to 16 bits of the
// largest of them and multiplied with the weights' integers exactly, before the scales of both. However many rows there
// are, wherever a row stands and however many threads there are, the chain is the same: the blocks below decide which
// numbers are computed together, never in what order one is summed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace sluice {
namespace {

constexpr int TILE = REGISTERS == 32 ? 12 : 6;  // rows at a time: with PANEL columns they fill the registers
constexpr int INTEGER_TILE = TILE / 2;          // of weights of few bits, which have sums of integers beside the result
constexpr int VECS = 2;
constexpr int PANEL = VECS * LANES;             // outputs whose weights are packed together
constexpr int AHEAD = 32;                       // inputs whose weights are prefetched before their turn
constexpr int64_t PARALLEL_FROM = 1 << 20;      // multiplications that are worth waking threads for

constexpr float LARGEST_INPUT = 32767;          // of 16 bits
constexpr float LEAST_INPUTS = 0x1p-100f;       // the largest of inputs that are taken for zeros

template <class T>
struct Result {
    T* out;
    const float* bias;  // [panels * PANEL], or null
    int64_t stride, outputs;

    // R rows of P panels, which are used up.
    template <int R, int P>
    void put(Vec (*acc)[P * VECS], int64_t row, int64_t panel) const {
        const int64_t first = panel * PANEL, columns = std::min<int64_t>(P * PANEL, outputs - first);
        for (int r = 0; r < R; ++r) {
            T* to = out + (row + r) * stride + first;
            T last[P * PANEL];
            T* target = columns == P * PANEL ? to : last;
            for (int c = 0; c < P * VECS; ++c) {
                if (bias != nullptr) acc[r][c] += load(bias + first + c * LANES);
                store(target + c * LANES, acc[r][c]);
            }
            if (target == last) std::copy(last, last + columns, to);
        }
    }
};

template <class T, class W>
struct Product {
    Result<T> result;
    const float* x;   // [rows, inputs]
    const W* weight;  // [panels, inputs, PANEL] in the order of `place`, zero past the last output
    int64_t rows, inputs;
};

static_assert(VECS == 2, "a word holds two weights of bf16");

// Where a panel keeps the weight of one of its outputs, and how the registers get them. Two of bf16 share a word, those
// of a lane in the first register and in the second: a shift widens the one, a mask the other.
inline int64_t place(const float*, int64_t column) { return column; }
inline int64_t place(const BFloat16*, int64_t column) { return column % LANES * VECS + column / LANES; }

inline void load_panel(Vec* w, const float* panel) {
    for (int v = 0; v < VECS; ++v) w[v] = load(panel + v * LANES);
}

inline void load_panel(Vec* w, const BFloat16* panel) {
    Bits words;
    std::memcpy(&words, panel, sizeof words);
    w[0] = (Vec)(words << 16);
    w[1] = (Vec)(words & 0xffff0000u);
}

// R rows from `row` on times P panels from `panel` on. Few rows take several panels: one would leave the chains too few.
template <int R, int P, class T, class W>
__attribute__((noinline)) void multiply_tile(const Product<T, W>& product, int64_t row, int64_t panel) {
    constexpr int COLUMNS = P * VECS;
    const int64_t inputs = product.inputs;
    const float* x = product.x + row * inputs;
    const W* weight = product.weight + panel * PANEL * inputs;
    Vec acc[R][COLUMNS] = {};
    for (int64_t i = 0; i < inputs; ++i, weight += PANEL) {
        Vec w[COLUMNS];
        for (int p = 0; p < P; ++p) load_panel(w + p * VECS, weight + p * PANEL * inputs);
        for (int p = 0; p < P; ++p) __builtin_prefetch(weight + p * PANEL * inputs + AHEAD * PANEL);
        for (int r = 0; r < R; ++r) {
            const Vec input = spread(x[r * inputs + i]);
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = fused(w[c], input, acc[r][c]);
        }
    }
    product.result.template put<R, P>(acc, row, panel);
}

// Weights of few bits, and the rows in integers.
template <class T, int BITS>
struct IntegerProduct {
    static constexpr int PAIRS = 16 / BITS;  // of inputs whose weights share a pair of words
    Result<T> result;
    const PackedLinear& linear;
    const int16_t* x;  // [rows, groups, linear.group]
    const float *scale, *sum;  // [rows, groups], and the sum of a group's integers times the scale
    int64_t rows, groups;
};

// Two inputs' weights of each lane: those of pair `pair` of the words.
template <int BITS, int pair>
inline Shorts integers(Bits words) {
    if constexpr (BITS == 4) return (Shorts)(words >> (4 * pair) & 0x000f000fu);
    return pair == 0 ? (Shorts)(words << 8) >> 8 : (Shorts)words >> 8;
}

// The scale and minimum of a panel's weights for a group of inputs; false if all minima are 0.
inline bool load_factors(const PackedLinear& linear, int64_t panel, int64_t groups, int64_t g, Vec* scale, Vec* minimum) {
    const int64_t kinds = linear.num_factors, blocks = groups / linear.groups_per_block;
    const auto* factors = (const Float16*)linear.factors + (panel * blocks + g / linear.groups_per_block) * kinds * PANEL;
    const int8_t* steps = linear.steps == nullptr ? nullptr : linear.steps + (panel * groups + g) * kinds * PANEL;
    for (int v = 0; v < VECS; ++v) {
        scale[v] = load(factors + v * LANES);
        if (steps != nullptr) scale[v] *= load(steps + v * LANES);
        if (kinds == 2) {
            minimum[v] = load(factors + PANEL + v * LANES);
            if (steps != nullptr) minimum[v] *= load(steps + PANEL + v * LANES);
        } else {
            minimum[v] = -8 * scale[v];
        }
    }
    return kinds == 2 || linear.bits == 4;
}

template <int R, int P, class T, int BITS>
__attribute__((noinline)) void multiply_tile(const IntegerProduct<T, BITS>& product, int64_t row, int64_t panel) {
    constexpr int COLUMNS = P * VECS, PAIRS = IntegerProduct<T, BITS>::PAIRS, WORDS = PANEL * 4;
    const PackedLinear& linear = product.linear;
    const int64_t groups = product.groups, inputs = groups * linear.group, bytes = inputs * PANEL * BITS / 8;
    const int16_t* x = product.x + row * inputs;
    const char* weight = (const char*)linear.weight + panel * bytes;
    Vec total[R][COLUMNS] = {};
    for (int64_t g = 0; g < groups; ++g) {
        Ints acc[R][COLUMNS] = {};
        for (int64_t i = 0; i < linear.group; i += 2 * PAIRS, weight += WORDS, x += 2 * PAIRS) {
            Bits words[COLUMNS];
            for (int p = 0; p < P; ++p) {
                std::memcpy(words + p * VECS, weight + p * bytes, WORDS);
                __builtin_prefetch(weight + p * bytes + AHEAD * WORDS / 4);
                __builtin_prefetch(weight + p * bytes + AHEAD * WORDS / 4 + WORDS / 2);
            }
            unrolled<PAIRS>([&](auto pair) {
                Shorts w[COLUMNS];
                for (int c = 0; c < COLUMNS; ++c) w[c] = integers<BITS, pair>(words[c]);
                for (int r = 0; r < R; ++r) {
                    uint32_t two;
                    std::memcpy(&two, x + r * inputs + 2 * pair, sizeof two);
                    const Shorts input = (Shorts)(two - Bits{});
                    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = dot(w[c], input, acc[r][c]);
                }
            });
        }
        Vec scale[COLUMNS], minimum[COLUMNS];
        bool has_minimum = false;
        for (int p = 0; p < P; ++p) {
            has_minimum = load_factors(linear, panel + p, groups, g, scale + p * VECS, minimum + p * VECS);
        }
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * groups + g;
            const Vec of_inputs = spread(product.scale[at]), sum = spread(product.sum[at]);
            for (int c = 0; c < COLUMNS; ++c) {
                total[r][c] = fused(__builtin_convertvector(acc[r][c], Vec) * of_inputs, scale[c], total[r][c]);
                if (has_minimum) total[r][c] = fused(sum, minimum[c], total[r][c]);
            }
        }
    }
    product.result.template put<R, P>(total, row, panel);
}

// A tile of as many rows as `rows` says, which R bounds.
template <int R, int P, class Product>
void multiply_rows(const Product& product, int64_t row, int rows, int64_t panel) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1, P>(product, row, rows, panel);
    }
    multiply_tile<R, P>(product, row, panel);
}

// All rows times `count` panels, P if there are as many. Tiles are of almost equal height: a low one is slow.
template <int R, int P, class Product>
void multiply_panels(const Product& product, int64_t panel, int64_t count) {
    const int64_t tiles = (product.rows + R - 1) / R;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = product.rows * t / tiles;
        const int rows = int(product.rows * (t + 1) / tiles - row);
        if (count == P) {
            multiply_rows<R, P>(product, row, rows, panel);
        } else {
            for (int64_t p = panel; p < panel + count; ++p) multiply_rows<R, 1>(product, row, rows, p);
        }
    }
}

template <int R, int P, class Product>
void multiply(const Product& product, int threads) {
    const int64_t panels = (product.result.outputs + PANEL - 1) / PANEL;
    parallel_for((panels + P - 1) / P, threads, [&](int64_t group) {
        multiply_panels<R, P>(product, group * P, std::min<int64_t>(P, panels - group * P));
    });
}

// x in fp32: itself, or a copy in the thread's memory, which grows to that of the largest step.
inline const float* widened(const float* x, int64_t) { return x; }

template <class T>
const float* widened(const T* x, int64_t count) {
    static thread_local std::vector<float> wide;
    wide.resize(std::max<size_t>(wide.size(), size_t(count)));
    for (int64_t i = 0; i < count; ++i) wide[i] = widen(x[i]);
    return wide.data();
}

// Rows in 16 bits of the largest input of each group. Groups of zeros have the scale 0; one with a number that is none, or
// infinite, has a scale that is none.
struct Integers {
    std::vector<int16_t> x;
    std::vector<float> scale, sum;

    void set(const float* from, int64_t rows, int64_t inputs, int64_t group, int threads) {
        const int64_t groups = (inputs + group - 1) / group;
        x.resize(std::max<size_t>(x.size(), size_t(rows * groups * group)));
        scale.resize(std::max<size_t>(scale.size(), size_t(rows * groups)));
        sum.resize(scale.size());
        parallel_for(rows, threads, [&](int64_t row) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t count = std::min(group, inputs - g * group), at = row * groups + g;
                round(from + row * inputs + g * group, count, group, x.data() + at * group, &scale[at], &sum[at]);
            }
        });
    }

    static void round(const float* from, int64_t count, int64_t group, int16_t* to, float* scale, float* sum) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, as_bits(from[i]) & 0x7fffffffu);
        const float bound = as_float(largest);
        const bool is_finite = largest < 0x7f800000u, is_zero = bound < LEAST_INPUTS;
        const float factor = is_finite && !is_zero ? LARGEST_INPUT / bound : 0.0f;
        const float magic = 0x1.8p23f;
        int32_t total = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float shifted = (is_finite ? from[i] : 0.0f) * factor + magic;
            to[i] = int16_t(as_bits(shifted) - as_bits(magic));
            total += to[i];
        }
        std::fill(to + count, to + group, int16_t(0));
        *scale = is_finite ? (is_zero ? 0.0f : bound / LARGEST_INPUT) : NAN;
        *sum = float(total) * *scale;
    }
};

template <class T>
void pack(T* packed, const T* weight, int64_t outputs, int64_t inputs, int threads) {
    parallel_for((outputs + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
        const int64_t first = panel * PANEL, columns = std::min<int64_t>(PANEL, outputs - first);
        T* to = packed + first * inputs;
        for (int64_t i = 0; i < inputs; ++i) {
            for (int64_t c = 0; c < PANEL; ++c) {
                to[i * PANEL + place(to, c)] = c < columns ? weight[(first + c) * inputs + i] : T{};
            }
        }
    });
}

// fp16 is not among them: widening it takes longer than the product.
template <class Visit>
void with_weight(int dtype, Visit visit) {
    if (dtype == FLOAT32) {
        visit(static_cast<float*>(nullptr));
    } else {
        visit(static_cast<BFloat16*>(nullptr));
    }
}

template <int HIGHEST, class Product>
void multiply_all(const Product& product, int64_t inputs, int threads) {
    const int team = product.rows * product.result.outputs * inputs < PARALLEL_FROM ? 1 : threads;
    if (product.rows == 1) {
        multiply<1, 4>(product, team);
    } else if (product.rows <= 3) {
        multiply<3, 2>(product, team);
    } else {
        multiply<HIGHEST, 1>(product, team);
    }
}

template <class T, int BITS>
void multiply_integers(const Result<T>& result, const PackedLinear& linear, const float* x, int64_t rows, int threads) {
    static thread_local Integers integers;
    integers.set(x, rows, linear.inputs, linear.group, rows * linear.inputs < PARALLEL_FROM ? 1 : threads);
    const int64_t groups = (linear.inputs + linear.group - 1) / linear.group;
    const IntegerProduct<T, BITS> product{
        result, linear, integers.x.data(), integers.scale.data(), integers.sum.data(), rows, groups};
    multiply_all<INTEGER_TILE>(product, linear.inputs, threads);
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

int sluice_linear_panel() { return PANEL; }

int64_t sluice_outputs(const PackedLinear* linear) {
    int64_t outputs = 0;
    for (; linear != nullptr; linear = linear->next) outputs += linear->outputs;
    return outputs;
}

void sluice_pack_weight(int dtype, void* packed, const void* weight, int64_t outputs, int64_t inputs, int threads) {
    with_weight(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        pack((T*)packed, (const T*)weight, outputs, inputs, threads);
    });
}

void sluice_linear(int dtype, void* out, const void* x, const PackedLinear* linear, int64_t rows, int threads) {
    with_weight(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        const float* wide = widened((const T*)x, rows * linear->inputs);
        T* to = (T*)out;
        const int64_t stride = sluice_outputs(linear);
        for (const PackedLinear* part = linear; part != nullptr; to += part->outputs, part = part->next) {
            const Result<T> result{to, part->bias, stride, part->outputs};
            if (part->factors == nullptr) {
                const Product<T, T> product{result, wide, (const T*)part->weight, rows, part->inputs};
                multiply_all<TILE>(product, part->inputs, threads);
            } else if (part->bits == 4) {
                multiply_integers<T, 4>(result, *part, wide, rows, threads);
            } else {
                multiply_integers<T, 8>(result, *part, wide, rows, threads);
            }
        }
    });
}

}  // extern "C"
