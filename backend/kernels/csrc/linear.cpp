// Products with weights that never change: x @ weight.T + bias, for any number of rows.
//
// A number of the result is one chain of multiplications and additions in fp32, from the first input to the last, then
// the bias. Weights of 8 bits are multiplied by their scales first, and then are fp32 like others. However many rows
// there are, wherever a row stands and however many threads there are, the chain is the same: the blocks below decide
// which numbers are computed together, never in what order one is summed.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace sluice {
namespace {

constexpr int TILE = REGISTERS == 32 ? 12 : 6;  // rows at a time: with PANEL columns they fill the registers
constexpr int VECS = 2;
constexpr int PANEL = VECS * LANES;             // outputs whose weights are packed together
constexpr int AHEAD = 32;                       // inputs whose weights are prefetched before their turn
constexpr int64_t INPUTS_PER_SCALE = 32;        // of an output's weights of 8 bits, as in GGUF's Q8_0
constexpr int64_t PARALLEL_FROM = 1 << 20;      // multiplications that are worth waking threads for

template <class T, class W>
struct Product {
    T* out;              // [rows, outputs]
    const float* x;      // [rows, inputs]
    const W* weight;     // [panels, inputs, PANEL] in the order of `place`, zero past the last output
    const float* scale;  // [panels, groups, PANEL] of weights of 8 bits, a group of INPUTS_PER_SCALE inputs; else null
    const float* bias;   // [panels * PANEL], or null
    int64_t rows, outputs, inputs;
};

static_assert(VECS == 2, "a word holds two weights of bf16");

// Where a panel keeps the weight of one of its outputs, and how the registers get them. Two of bf16 share a word, those
// of a lane in the first register and in the second: a shift widens the one, a mask the other.
inline int64_t place(const float*, int64_t column) { return column; }
inline int64_t place(const int8_t*, int64_t column) { return column; }
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

inline void load_panel(Vec* w, const int8_t* panel) {
    for (int v = 0; v < VECS; ++v) w[v] = load(panel + v * LANES);
}

// R rows from `row` on times P panels from `panel` on. Few rows take several panels: one would leave the chains too few.
template <int R, int P, class T, class W>
__attribute__((noinline)) void multiply_tile(const Product<T, W>& product, int64_t row, int64_t panel) {
    constexpr int COLUMNS = P * VECS;
    const int64_t inputs = product.inputs, first = panel * PANEL;
    const float* x = product.x + row * inputs;
    const W* weight = product.weight + first * inputs;
    Vec acc[R][COLUMNS] = {};
    constexpr bool HAS_SCALES = std::is_same_v<W, int8_t>;
    const int64_t group = HAS_SCALES ? INPUTS_PER_SCALE : inputs, groups = (inputs + group - 1) / group;
    for (int64_t begin = 0; begin < inputs; begin += group) {
        Vec scale[COLUMNS];
        if constexpr (HAS_SCALES) {
            const float* scales = product.scale + first * groups + begin / group * PANEL;
            for (int c = 0; c < COLUMNS; ++c) scale[c] = load(scales + c / VECS * PANEL * groups + c % VECS * LANES);
        }
        for (int64_t i = begin; i < std::min(begin + group, inputs); ++i, weight += PANEL) {
            Vec w[COLUMNS];
            for (int p = 0; p < P; ++p) load_panel(w + p * VECS, weight + p * PANEL * inputs);
            for (int p = 0; p < P; ++p) __builtin_prefetch(weight + p * PANEL * inputs + AHEAD * PANEL);
            if constexpr (HAS_SCALES) {
                for (int c = 0; c < COLUMNS; ++c) w[c] *= scale[c];
            }
            for (int r = 0; r < R; ++r) {
                const Vec input = spread(x[r * inputs + i]);
                for (int c = 0; c < COLUMNS; ++c) acc[r][c] = fused(w[c], input, acc[r][c]);
            }
        }
    }
    const int64_t columns = std::min<int64_t>(P * PANEL, product.outputs - first);
    for (int r = 0; r < R; ++r) {
        T* out = product.out + (row + r) * product.outputs + first;
        T last[P * PANEL];
        T* target = columns == P * PANEL ? out : last;
        for (int c = 0; c < COLUMNS; ++c) {
            if (product.bias != nullptr) acc[r][c] += load(product.bias + first + c * LANES);
            store(target + c * LANES, acc[r][c]);
        }
        if (target == last) std::copy(last, last + columns, out);
    }
}

// A tile of as many rows as `rows` says, which R bounds.
template <int R, int P, class T, class W>
void multiply_rows(const Product<T, W>& product, int64_t row, int rows, int64_t panel) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1, P>(product, row, rows, panel);
    }
    multiply_tile<R, P>(product, row, panel);
}

// All rows times `count` panels, P if there are as many. Tiles are of almost equal height: a low one is slow.
template <int R, int P, class T, class W>
void multiply_panels(const Product<T, W>& product, int64_t panel, int64_t count) {
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

template <int R, int P, class T, class W>
void multiply(const Product<T, W>& product, int threads) {
    const int64_t panels = (product.outputs + PANEL - 1) / PANEL;
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

template <class T, class W>
void multiply_all(const Product<T, W>& product, int threads) {
    const int team = product.rows * product.outputs * product.inputs < PARALLEL_FROM ? 1 : threads;
    if (product.rows == 1) {
        multiply<1, 4>(product, team);
    } else if (product.rows <= 3) {
        multiply<3, 2>(product, team);
    } else {
        multiply<TILE, 1>(product, team);
    }
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

int sluice_linear_panel() { return PANEL; }

int sluice_inputs_per_scale() { return INPUTS_PER_SCALE; }

void sluice_pack_weight(int dtype, void* packed, const void* weight, int64_t outputs, int64_t inputs, int threads) {
    if (dtype == INT8) return pack((int8_t*)packed, (const int8_t*)weight, outputs, inputs, threads);
    with_weight(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        pack((T*)packed, (const T*)weight, outputs, inputs, threads);
    });
}

void sluice_linear(
    int dtype, void* out, const void* x, const void* packed, const float* scale, const float* bias, int64_t rows,
    int64_t outputs, int64_t inputs, int threads) {
    with_weight(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        const float* wide = widened((const T*)x, rows * inputs);
        const auto times = [&](auto* weight) {
            using W = std::remove_pointer_t<decltype(weight)>;
            multiply_all(Product<T, W>{(T*)out, wide, (const W*)packed, scale, bias, rows, outputs, inputs}, threads);
        };
        scale == nullptr ? times(storage) : times(static_cast<int8_t*>(nullptr));
    });
}

}  // extern "C"
