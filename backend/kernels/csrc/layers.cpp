// All layers of a decoder in one call, from the embedded tokens to the normed hidden states.
//
// The operations are those that Python would call one by one, in the same order and with the same numbers. Between two of
// them no interpreter runs: its code and its objects have left the caches by then, because each product reads its weights
// through them. The interpreter's lock is given up once for a step, and not once for each operation.

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "storage.h"

namespace sluice {
namespace {

constexpr int64_t CACHE_LINE = 64;

struct Layer {
    const void *input_norm, *q_norm, *k_norm;
    const void *attended_norm, *post_attention_norm, *fed_norm;  // the first and the last may be null
    const float* cos_sin;
    const PackedLinear *qkv, *output, *gate_up, *down;
    int64_t window, group, place;  // of the layer's keys and values: which layers share a block, and where in that
};

struct Stack {
    const Layer* layers;
    const void* final_norm;
    int64_t num_layers, hidden, num_heads, num_kv_heads, dim;
    float eps, scale;
    int dtype, gelu;
};

// Strides are in elements: of a block, of a layer in it, from a layer's keys to its values, and of a head in those.
struct Pool {
    void* blocks;
    int64_t block_stride, layer_stride, value_stride, head_stride, block_size;
};

enum Place : int { QKV, OUTPUT, GATE_UP, DOWN, NUM_PRODUCTS };

constexpr int MAX_PARTS = 3;

// See `StepAdapters`; `width` is the number of places of a layer.
struct Adapters {
    const int32_t* rows;
    const int64_t* vectors;
    const void* memory;
    int64_t num_layers, width, rank;
    int64_t first[NUM_PRODUCTS], num_parts[NUM_PRODUCTS], outputs[NUM_PRODUCTS][MAX_PARTS];
};

// Of a group of layers.
struct Table {
    const int64_t* slot_mapping;
    const int32_t* block_tables;
    int64_t table_width;
};

struct Step {
    const int64_t* positions;
    const int32_t *query_start, *context_lens;
    int64_t tokens, num_seqs;
    const Table* tables;
    const Adapters* adapters;  // null: no token has one
};

int64_t item_bytes(const Stack& decoder) { return decoder.dtype == FLOAT32 ? 4 : 2; }

// Bytes of a tensor, rounded up so that the next begins with a cache line.
int64_t tensor_bytes(const Stack& decoder, int64_t rows, int64_t columns) {
    return (rows * columns * item_bytes(decoder) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

// What stands between the branches of a layer. Those of attention and those of the MLP share their memory.
struct Scratch {
    char *branch, *qkv, *query, *attended, *gate_up, *activated;
    int64_t bytes;

    Scratch(const Stack& decoder, int64_t rows, char* memory) {
        const Layer& layer = decoder.layers[0];
        const auto take = [&](char*& tensor, int64_t begin, int64_t columns) {
            tensor = memory + begin;
            return begin + tensor_bytes(decoder, rows, columns);
        };
        const int64_t shared = take(branch, 0, decoder.hidden);
        int64_t end = take(qkv, shared, sluice_outputs(layer.qkv));
        end = take(query, end, layer.output->inputs);
        end = take(attended, end, layer.output->inputs);
        bytes = take(activated, take(gate_up, shared, sluice_outputs(layer.gate_up)), layer.down->inputs);
        bytes = std::max(bytes, end);
    }
};

struct Run {
    const Stack& decoder;
    const Pool& pool;
    const Step& step;
    Scratch scratch;
    void *x, *residual;
    int threads;

    void multiply(const PackedLinear* linear, int64_t layer, Place product, void* out, const void* in) const {
        sluice_linear(decoder.dtype, out, in, linear, step.tokens, threads);
        if (const Adapters* of = step.adapters) {
            sluice_adapt(
                decoder.dtype, out, in, of->rows, of->vectors + layer * of->width + of->first[product],
                of->num_layers * of->width, of->memory, of->rank, of->outputs[product], of->num_parts[product],
                step.tokens, linear->inputs, threads);
        }
    }

    // x = norm(residual + branch), and the sum stays in `residual`.
    void add_norm(const void* weight) const {
        sluice_add_rms_norm(
            decoder.dtype, x, scratch.branch, residual, weight, step.tokens, decoder.hidden, decoder.eps, threads);
    }

    void norm_branch(const void* weight) const {
        if (weight == nullptr) return;
        char* branch = scratch.branch;
        sluice_rms_norm(decoder.dtype, branch, branch, weight, step.tokens, decoder.hidden, decoder.eps, threads);
    }

    void attend(const Layer& layer, int64_t index) const {
        const Table& table = step.tables[layer.group];
        char* keys = static_cast<char*>(pool.blocks) + layer.place * pool.layer_stride * item_bytes(decoder);
        char* values = keys + pool.value_stride * item_bytes(decoder);
        multiply(layer.qkv, index, QKV, scratch.qkv, x);
        sluice_rope_and_store(
            decoder.dtype, scratch.query, scratch.qkv, layer.cos_sin, layer.q_norm, layer.k_norm, decoder.eps, keys,
            values, pool.block_stride, pool.head_stride, pool.block_size, step.positions, table.slot_mapping, step.tokens,
            decoder.num_heads, decoder.num_kv_heads, decoder.dim, threads);
        sluice_paged_attention(
            decoder.dtype, scratch.attended, scratch.query, keys, values, pool.block_stride, pool.head_stride,
            pool.block_size, step.positions, step.query_start, step.context_lens, table.block_tables, table.table_width,
            step.num_seqs, decoder.num_heads, decoder.num_kv_heads, decoder.dim, decoder.scale, layer.window, nullptr, threads);
        multiply(layer.output, index, OUTPUT, scratch.branch, scratch.attended);
        norm_branch(layer.attended_norm);
    }

    void feed_forward(const Layer& layer, int64_t index) const {
        multiply(layer.gate_up, index, GATE_UP, scratch.gate_up, x);
        sluice_gate(
            decoder.dtype, scratch.activated, scratch.gate_up, step.tokens, layer.down->inputs, decoder.gelu, threads);
        multiply(layer.down, index, DOWN, scratch.branch, scratch.activated);
        norm_branch(layer.fed_norm);
    }

    void layers() const {
        std::memset(scratch.branch, 0, size_t(step.tokens * decoder.hidden * item_bytes(decoder)));
        for (int64_t index = 0; index < decoder.num_layers; ++index) {
            const Layer& layer = decoder.layers[index];
            add_norm(layer.input_norm);
            attend(layer, index);
            add_norm(layer.post_attention_norm);
            feed_forward(layer, index);
        }
        add_norm(decoder.final_norm);
    }
};

}  // namespace
}  // namespace sluice

using namespace sluice;

extern "C" {

// The bytes of memory that a step of `tokens` needs beside its hidden states.
int64_t sluice_layers_scratch(const Stack* decoder, int64_t tokens) {
    return Scratch(*decoder, tokens, nullptr).bytes;
}

// `residual` holds the embedded tokens [tokens, hidden] and is written to; `out` [tokens, hidden] gets the result.
void sluice_layers(
    const Stack* decoder, const Pool* pool, const Step* step, void* out, void* residual, void* scratch, int threads) {
    const Scratch tensors(*decoder, step->tokens, static_cast<char*>(scratch));
    Run{*decoder, *pool, *step, tensors, out, residual, threads}.layers();
}

}  // extern "C"
