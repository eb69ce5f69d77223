// The low-rank products of adapters, row by row: y = A x, then out += B y, where each vector of A and B lies by itself.
//
// Rows that follow each other with one adapter share its vectors, and are taken a few at a time. Each number is one
// chain over its vector, or over the ranks, whose order no other row decides: a row has the same bits in every batch.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace sluice {
namespace {

constexpr int TILE = 4;     // rows at a time
constexpr int VECTORS = 4;  // vectors of A at a time, and registers of outputs
constexpr int64_t PARALLEL_FROM = 1 << 18;  // multiplications that are worth waking threads for

struct Tile {
    const int64_t* places;  // of its adapter, for this product
    int64_t row;
    int rows;
};

template <class T>
struct Adapted {
    T* out;
    const T* x;
    const T* memory;
    const int64_t* part_outputs;
    int64_t inputs, outputs, rank, num_parts;
    float* scaled;  // [tokens, num_parts * rank], A x

    int64_t places() const { return num_parts * rank; }

    // A x for vectors [place, place + VECTORS) of as many rows.
    template <int R>
    void shrink_rows(const Tile& tile, int64_t place) const {
        const T* a[VECTORS];
        const int count = int(std::min<int64_t>(VECTORS, places() - place));
        bool some = false;
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t begin = v < count ? tile.places[place + v] : -1;
            a[v] = memory + std::max<int64_t>(begin, 0);  // of one that is none, any numbers
            some |= begin >= 0;
        }
        if (!some) return;
        const T* from = x + tile.row * inputs;
        Vec acc[R][VECTORS] = {};
        int64_t i = 0;
        for (; i + LANES <= inputs; i += LANES) {
            Vec w[VECTORS];
            for (int v = 0; v < VECTORS; ++v) w[v] = load(a[v] + i);
            for (int r = 0; r < R; ++r) {
                const Vec input = load(from + r * inputs + i);
                for (int v = 0; v < VECTORS; ++v) acc[r][v] = fused(w[v], input, acc[r][v]);
            }
        }
        for (int r = 0; r < R; ++r) {
            float* to = scaled + (tile.row + r) * places() + place;
            for (int v = 0; v < count; ++v) {
                float total = sum(acc[r][v]);
                for (int64_t j = i; j < inputs; ++j) total = fused(widen(a[v][j]), widen(from[r * inputs + j]), total);
                to[v] = total;
            }
        }
    }

    // out += B y for the outputs [column, column + VECTORS * LANES) of a part, as far as it goes.
    template <int R>
    void expand_rows(const Tile& tile, int64_t part, int64_t begin, int64_t column) const {
        const int64_t *up = tile.places + (num_parts + part) * rank, left = part_outputs[part] - column;
        T* to = out + tile.row * outputs + begin + column;
        const float* y = scaled + tile.row * places() + part * rank;
        if (left >= VECTORS * LANES) {
            Vec acc[R][VECTORS] = {};
            bool some = false;
            for (int64_t k = 0; k < rank; ++k) {
                if (up[k] < 0) continue;
                some = true;
                const T* b = memory + up[k] + column;
                Vec w[VECTORS];
                for (int v = 0; v < VECTORS; ++v) w[v] = load(b + v * LANES);
                for (int r = 0; r < R; ++r) {
                    const Vec input = spread(y[r * places() + k]);
                    for (int v = 0; v < VECTORS; ++v) acc[r][v] = fused(w[v], input, acc[r][v]);
                }
            }
            for (int r = 0; some && r < R; ++r) {
                for (int v = 0; v < VECTORS; ++v) {
                    T* at = to + r * outputs + v * LANES;
                    store(at, load(at) + acc[r][v]);
                }
            }
            return;
        }
        for (int r = 0; r < R; ++r) {
            for (int64_t j = 0; j < left; ++j) {
                float total = 0;
                for (int64_t k = 0; k < rank; ++k) {
                    if (up[k] >= 0) total = fused(widen(memory[up[k] + column + j]), y[r * places() + k], total);
                }
                to[r * outputs + j] = narrow<T>(widen(to[r * outputs + j]) + total);
            }
        }
    }

    template <int R = TILE>
    void shrink(const Tile& tile, int64_t place) const {
        if constexpr (R > 1) {
            if (tile.rows < R) return shrink<R - 1>(tile, place);
        }
        shrink_rows<R>(tile, place);
    }

    template <int R = TILE>
    void expand(const Tile& tile, int64_t part, int64_t begin, int64_t column) const {
        if constexpr (R > 1) {
            if (tile.rows < R) return expand<R - 1>(tile, part, begin, column);
        }
        expand_rows<R>(tile, part, begin, column);
    }

    void shrink_all(const Tile& tile) const {
        for (int64_t place = 0; place < places(); place += VECTORS) shrink(tile, place);
    }

    void expand_all(const Tile& tile) const {
        int64_t begin = 0;
        for (int64_t part = 0; part < num_parts; begin += part_outputs[part++]) {
            for (int64_t c = 0; c < part_outputs[part]; c += VECTORS * LANES) expand(tile, part, begin, c);
        }
    }
};

// Memory of the calling thread, which grows to that of the largest step.
float* scratch(int64_t count) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max<size_t>(memory.size(), size_t(count)));
    return memory.data();
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

void sluice_adapt(
    int dtype, void* out, const void* x, const int32_t* rows, const int64_t* vectors, int64_t row_stride,
    const void* memory, int64_t rank, const int64_t* part_outputs, int64_t num_parts, int64_t tokens, int64_t inputs,
    int threads) {
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    int64_t adapted_rows = 0, outputs = 0;
    for (int64_t row = 0, end; row < tokens; row = end) {
        for (end = row + 1; end < tokens && end < row + TILE && rows[end] == rows[row];) ++end;
        if (rows[row] < 0) continue;
        tiles.push_back({vectors + rows[row] * row_stride, row, int(end - row)});
        adapted_rows += end - row;
    }
    if (tiles.empty()) return;
    for (int64_t part = 0; part < num_parts; ++part) outputs += part_outputs[part];
    const int team = adapted_rows * rank * (num_parts * inputs + outputs) < PARALLEL_FROM ? 1 : threads;
    float* scaled = scratch(tokens * num_parts * rank);
    const std::vector<Tile>& all = tiles;  // of this thread, and not of the one that computes a tile
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        const Adapted<T> adapted{(T*)out, (const T*)x, (const T*)memory, part_outputs, inputs, outputs, rank, num_parts,
                                 scaled};
        parallel_for(int64_t(all.size()), team, [&](int64_t index) {
            adapted.shrink_all(all[index]);
            adapted.expand_all(all[index]);
        });
    });
}

}  // extern "C"
