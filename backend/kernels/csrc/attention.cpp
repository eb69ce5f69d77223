// Paged attention over ragged queries with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).
//
// The work is cut into tiles: consecutive query positions of one sequence times the query heads of one KV head, so that
// a key is read once for all of them. A decode step is a tile of one position. Keys are taken CHUNK tokens at a time.
//
// A row's result depends on its own query and its sequence's keys alone, to the last bit: not on which rows share its
// tile, nor on how a prompt was cut into steps. Chunks therefore begin at multiples of CHUNK for every tile; keys
// that a row does not see have weight 0 in sums over whole chunks; and both ways to multiply queries by keys add in one order.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace sluice {
namespace {

constexpr int CHUNK = 64;
constexpr int TILE_ROWS = 128;
constexpr int MAX_HEAD_DIM = 512;
constexpr int CACHE_LINE = 64;
constexpr int ROWS = 4;                          // rows of a register block
constexpr int VECS = REGISTERS == 32 ? 4 : 2;    // its columns, in registers
constexpr int TRANSPOSE_FROM = 8;                // rows from which transposing the keys pays
constexpr int64_t PARALLEL_FROM = 1 << 19;       // multiplications that are worth waking threads for

struct Shape {
    int64_t num_heads, num_kv_heads, dim;
    int64_t block_stride, head_stride, block_size, table_width;
    int64_t window;  // keys at distance < window are seen
    float scale;
    const float* sinks;  // of each query head one more score, to which no value belongs; or null
};

template <class T>
struct Tensors {
    T* out;
    const T* q;
    const T* k_cache;
    const T* v_cache;
    const int64_t* positions;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
};

struct Tile {
    int32_t seq, head, first, count;  // query rows [first, first + count) of the step
};

// Where the keys and values of up to CHUNK consecutive tokens of one head lie.
template <class T>
struct Chunk {
    const T *keys[CHUNK], *values[CHUNK];
    int count;
};

// A thread's working memory, kept from call to call. Rows are query positions times heads of the group.
struct Scratch {
    alignas(64) float q[TILE_ROWS * MAX_HEAD_DIM];       // [rows, dim], scaled
    alignas(64) float out[TILE_ROWS * MAX_HEAD_DIM];     // [rows, dim], not yet divided by `total`
    alignas(64) float weights[TILE_ROWS * CHUNK];        // [rows, CHUNK]
    alignas(64) float keys[MAX_HEAD_DIM * CHUNK];        // [dim, CHUNK]
    float largest[TILE_ROWS], total[TILE_ROWS];
};

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> memory(new Scratch);
    return *memory;
}

// Reading a page ahead is left to software: the processor's own prefetching stops at each page, and a block is often one.
template <class T>
inline void prefetch(const T* key, const T* value, int64_t dim) {
    for (int64_t c = 0; c < dim; c += CACHE_LINE / int64_t(sizeof(T))) {
        __builtin_prefetch(key + c, 0, 3);
        __builtin_prefetch(value + c, 0, 3);
    }
}

// scores[r, n] = q[r] . k[n] for R rows and `count` keys or some more, LANES at a time. Products are summed
// in LANES chains, of the dimensions that are equal modulo LANES, and those by pairs of neighbours, then of pairs.
template <int R, class T>
void dot_keys(float* scores, const float* q, const Chunk<T>& chunk, int count, const Chunk<T>& next, int64_t dim) {
    for (int first = 0; first < count; first += LANES) {
        Vec acc[R][LANES];
        for (int n = 0; n < LANES; ++n) {
            const T* k = chunk.keys[std::min(first + n, chunk.count - 1)];
            if (first + n < next.count) prefetch(next.keys[first + n], next.values[first + n], dim);
            Vec part[R] = {};
            for (int64_t c = 0; c < dim; c += LANES) {
                const Vec key = load(k + c);
                for (int r = 0; r < R; ++r) part[r] = fused(load(q + r * dim + c), key, part[r]);
            }
            for (int r = 0; r < R; ++r) acc[r][n] = part[r];
        }
        for (int r = 0; r < R; ++r) store(scores + r * CHUNK + first, sums(acc[r]));
    }
}

// keys[d, n] = k[n][d]; columns past the last key are zero.
template <class T>
void transpose_keys(float* keys, const Chunk<T>& chunk, int64_t dim) {
    for (int n = 0; n < chunk.count; ++n) {
        for (int64_t d = 0; d < dim; ++d) keys[d * CHUNK + n] = widen(chunk.keys[n][d]);
    }
    if (chunk.count == CHUNK) return;
    for (int64_t d = 0; d < dim; ++d) std::fill(keys + d * CHUNK + chunk.count, keys + (d + 1) * CHUNK, 0.0f);
}

// Adds to `acc` the products of R rows and VECS registers of columns, over the dimensions that are equal to one of
// [lane, lane + width) modulo LANES, in the order of `dot_keys`.
template <int R, int width>
inline void multiply_lanes(Vec (&acc)[R][VECS], const float* q, const float* keys, int64_t dim, int lane) {
    if constexpr (width == 1) {
        for (int64_t d = lane; d < dim; d += LANES) {
            Vec key[VECS];
            for (int v = 0; v < VECS; ++v) key[v] = load(keys + d * CHUNK + v * LANES);
            for (int r = 0; r < R; ++r) {
                const Vec query = spread(q[r * dim + d]);
                for (int v = 0; v < VECS; ++v) acc[r][v] = fused(query, key[v], acc[r][v]);
            }
        }
    } else {
        Vec upper[R][VECS] = {};
        multiply_lanes<R, width / 2>(acc, q, keys, dim, lane);
        multiply_lanes<R, width / 2>(upper, q, keys, dim, lane + width / 2);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < VECS; ++v) acc[r][v] += upper[r][v];
        }
    }
}

// scores[r, n] = q[r] . keys[:, n] for R rows and `count` keys or some more.
template <int R>
void multiply_keys(float* scores, const float* q, const float* keys, int count, int64_t dim) {
    for (int column = 0; column < count; column += VECS * LANES) {
        Vec acc[R][VECS] = {};
        multiply_lanes<R, LANES>(acc, q, keys + column, dim, 0);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < VECS; ++v) store(scores + r * CHUNK + column + v * LANES, acc[r][v]);
        }
    }
}

// out[r, columns] += weights[r] @ values for R rows, V registers of columns and `count` keys.
template <int R, int V, class T>
void add_values(float* out, const float* weights, const Chunk<T>& chunk, int count, int64_t dim, int64_t column) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * dim + column + v * LANES);
    }
    for (int n = 0; n < count; ++n) {
        const T* value = chunk.values[n] + column;
        for (int v = 0; v < V; ++v) {
            const Vec part = load(value + v * LANES);
            for (int r = 0; r < R; ++r) acc[r][v] = fused(part, spread(weights[r * CHUNK + n]), acc[r][v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(out + r * dim + column + v * LANES, acc[r][v]);
    }
}

template <int R, class T>
void add_values(float* out, const float* weights, const Chunk<T>& chunk, int count, int64_t dim) {
    int64_t column = 0;
    for (; column + VECS * LANES <= dim; column += VECS * LANES) {
        add_values<R, VECS, T>(out, weights, chunk, count, dim, column);
    }
    for (; column < dim; column += LANES) add_values<R, 1, T>(out, weights, chunk, count, dim, column);
}

// Calls `body(Rows<R>, first)` over `rows` rows in blocks of R = ROWS, then one by the remainder.
template <int R>
struct Rows {
    static constexpr int count = R;
};

template <class Body>
void in_row_blocks(int rows, Body body) {
    int row = 0;
    for (; row + ROWS <= rows; row += ROWS) body(Rows<ROWS>{}, row);
    switch (rows - row) {
        case 3: body(Rows<3>{}, row); break;
        case 2: body(Rows<2>{}, row); break;
        case 1: body(Rows<1>{}, row); break;
    }
}

// Scores of a whole chunk to weights, in place: 0 for the keys outside of [first, last). Brings `out` and `total` of the
// row to the new maximum.
__attribute__((noinline)) void soften(
    float* scores, int first, int last, float& largest, float& total, float* out, int64_t dim) {
    float peak = largest;
#pragma omp simd reduction(max : peak)  // of which the order does not matter
    for (int n = first; n < last; ++n) peak = std::max(peak, scores[n]);
    const float shrink = exponential(largest - peak);
#pragma omp simd
    for (int n = 0; n < CHUNK; ++n) {
        const float weight = exponential(scores[n] - peak);
        scores[n] = n >= first && n < last ? weight : 0.0f;
    }
    Vec sums = load(scores);
    for (int n = LANES; n < CHUNK; n += LANES) sums += load(scores + n);
    total = total * shrink + sum(sums);
    largest = peak;
    if (shrink == 1.0f) return;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out[d] *= shrink;
}

struct Span {
    int64_t start, stop;  // positions from the chunk of the first key that any query of a tile sees to the last
};

template <class T>
Span visible(const Tensors<T>& tensors, const Shape& shape, const Tile& tile) {
    const int64_t first = tensors.positions[tile.first], last = tensors.positions[tile.first + tile.count - 1];
    const int64_t start = std::max<int64_t>(0, first - shape.window + 1);
    return {start - start % CHUNK, std::min<int64_t>(tensors.context_lens[tile.seq], last + 1)};
}

// Finds the tokens of `tile` from position `base`, up to a chunk of them.
template <class T>
void locate(Chunk<T>& chunk, const Tensors<T>& tensors, const Shape& shape, const Tile& tile, Span span, int64_t base) {
    const int32_t* block = tensors.block_tables + tile.seq * shape.table_width + base / shape.block_size;
    int64_t offset = base % shape.block_size;
    chunk.count = int(std::min<int64_t>(CHUNK, span.stop - base));
    for (int n = 0; n < chunk.count; ++block, offset = 0) {
        int64_t at = *block * shape.block_stride + tile.head * shape.head_stride + offset * shape.dim;
        for (; n < chunk.count && offset < shape.block_size; ++n, ++offset, at += shape.dim) {
            chunk.keys[n] = tensors.k_cache + at;
            chunk.values[n] = tensors.v_cache + at;
        }
    }
}

// The place in q and out of row `row` of a tile.
int64_t place(const Shape& shape, const Tile& tile, int row) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return ((tile.first + row / group) * shape.num_heads + tile.head * group + row % group) * shape.dim;
}

template <class T>
void begin(Scratch& work, const Tensors<T>& tensors, const Shape& shape, const Tile& tile, int rows) {
    for (int r = 0; r < rows; ++r) {
        const T* q = tensors.q + place(shape, tile, r);
#pragma omp simd
        for (int64_t d = 0; d < shape.dim; ++d) work.q[r * shape.dim + d] = widen(q[d]) * shape.scale;
    }
    std::fill(work.out, work.out + rows * shape.dim, 0.0f);
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int r = 0; r < rows; ++r) {
        work.largest[r] = shape.sinks ? shape.sinks[tile.head * group + r % group] : -FLT_MAX;
        work.total[r] = shape.sinks ? 1.0f : 0.0f;
    }
}

template <class T>
void attend_chunk(
    Scratch& work, const Shape& shape, const int64_t* positions, int rows, int64_t base, const Chunk<T>& chunk,
    const Chunk<T>& next) {
    const int64_t dim = shape.dim, group = shape.num_heads / shape.num_kv_heads;
    const bool transposed = rows >= TRANSPOSE_FROM;
    if (transposed) transpose_keys(work.keys, chunk, dim);
    in_row_blocks(rows, [&](auto block, int row) {
        constexpr int R = decltype(block)::count;
        float* scores = work.weights + row * CHUNK;
        // Keys of the chunk up to the last that a row of the block sees: what comes after has weight 0 in all of them.
        const int64_t seen = positions[(row + R - 1) / group] + 1 - base;
        const int count = int(std::clamp<int64_t>(seen, 0, chunk.count));
        if (count == 0) return;
        if (transposed) {
            multiply_keys<R>(scores, work.q + row * dim, work.keys, count, dim);
        } else {
            dot_keys<R>(scores, work.q + row * dim, chunk, count, next, dim);
        }
        for (int r = row; r < row + R; ++r) {
            const int64_t after = positions[r / group] + 1 - base;
            const int last = int(std::clamp<int64_t>(after, 0, chunk.count));
            const int first = int(std::clamp<int64_t>(after - shape.window, 0, last));
            float* weights = work.weights + r * CHUNK;
            soften(weights, first, last, work.largest[r], work.total[r], work.out + r * dim, dim);
        }
        add_values<R>(work.out + row * dim, scores, chunk, count, dim);
    });
}

template <class T>
void finish(const Scratch& work, const Tensors<T>& tensors, const Shape& shape, const Tile& tile, int rows) {
    for (int r = 0; r < rows; ++r) {
        T* out = tensors.out + place(shape, tile, r);
        const float inverse = 1.0f / work.total[r];
#pragma omp simd
        for (int64_t d = 0; d < shape.dim; ++d) out[d] = narrow<T>(work.out[r * shape.dim + d] * inverse);
    }
}

// `after` is the tile whose first keys this one prefetches at its end, or null.
template <class T>
__attribute__((noinline)) void attend(const Tensors<T>& tensors, const Shape& shape, const Tile& tile, const Tile* after) {
    Scratch& work = scratch();
    const int rows = int(tile.count * (shape.num_heads / shape.num_kv_heads));
    begin(work, tensors, shape, tile, rows);

    const Span span = visible(tensors, shape, tile);
    Chunk<T> chunks[2];
    Chunk<T>*chunk = &chunks[0], *next = &chunks[1];
    locate(*chunk, tensors, shape, tile, span, span.start);
    for (int64_t base = span.start; base < span.stop; base += CHUNK) {
        next->count = 0;
        if (base + CHUNK < span.stop) {
            locate(*next, tensors, shape, tile, span, base + CHUNK);
        } else if (after != nullptr) {
            const Span other = visible(tensors, shape, *after);
            locate(*next, tensors, shape, *after, other, other.start);
        }
        attend_chunk(work, shape, tensors.positions + tile.first, rows, base, *chunk, *next);
        std::swap(chunk, next);
    }
    finish(work, tensors, shape, tile, rows);
}

// Largest tiles last would leave threads idle: sequences are taken in order, their tiles from the last position back.
std::vector<Tile> cut(const int32_t* query_start, int64_t num_seqs, const Shape& shape) {
    const int group = int(shape.num_heads / shape.num_kv_heads);
    const int span = std::max(1, TILE_ROWS / group);
    std::vector<Tile> tiles;
    for (int s = 0; s < num_seqs; ++s) {
        for (int stop = query_start[s + 1]; stop > query_start[s]; stop -= span) {
            const int first = std::max(query_start[s], stop - span);
            for (int head = 0; head < shape.num_kv_heads; ++head) tiles.push_back({s, head, first, stop - first});
        }
    }
    return tiles;
}

// A bound on the products of queries and keys: every query by the whole context of its sequence.
int64_t products(const int32_t* query_start, const int32_t* context_lens, int64_t num_seqs, const Shape& shape) {
    int64_t pairs = 0;
    for (int64_t s = 0; s < num_seqs; ++s) pairs += int64_t(query_start[s + 1] - query_start[s]) * context_lens[s];
    return pairs * shape.num_heads * shape.dim;
}

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

int sluice_max_group() { return TILE_ROWS; }
int sluice_max_head_dim() { return MAX_HEAD_DIM; }
int sluice_head_dim_multiple() { return LANES; }

void sluice_paged_attention(
    int dtype, void* out, const void* q, const void* k_cache, const void* v_cache, int64_t block_stride,
    int64_t head_stride, int64_t block_size, const int64_t* positions, const int32_t* query_start,
    const int32_t* context_lens, const int32_t* block_tables, int64_t table_width, int64_t num_seqs, int64_t num_heads,
    int64_t num_kv_heads, int64_t dim, float scale, int64_t window, const float* sinks, int threads) {
    const Shape shape{num_heads, num_kv_heads, dim, block_stride, head_stride, block_size, table_width, window, scale,
                      sinks};
    const std::vector<Tile> tiles = cut(query_start, num_seqs, shape);
    with_storage(dtype, [&](auto* storage) {
        using T = std::remove_pointer_t<decltype(storage)>;
        const Tensors<T> tensors{(T*)out,   (const T*)q, (const T*)k_cache, (const T*)v_cache,
                                 positions, query_start, context_lens,      block_tables};
        const int64_t count = int64_t(tiles.size());
        const int team = products(query_start, context_lens, num_seqs, shape) < PARALLEL_FROM ? 1 : threads;
        parallel_for(count, team, [&](int64_t i) {
            attend(tensors, shape, tiles[i], i + 1 < count ? &tiles[i + 1] : nullptr);
        });
    });
}

}  // extern "C"
