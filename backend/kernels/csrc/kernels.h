// The C interface: what Python calls, and what the layers of a decoder call of each other's files.
//
// `dtype` is a `DType`; tensors are contiguous and of that type where no other is said. `threads` is an upper bound.
#pragma once

#include <cstdint>

extern "C" {

void sluice_rms_norm(
    int dtype, void* out, const void* x, const void* weight, int64_t rows, int64_t size, float eps, int threads);

void sluice_add_rms_norm(
    int dtype, void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t size, float eps,
    int threads);

// SiLU of the first half of each row times the second, or GELU by tanh.
void sluice_gate(int dtype, void* out, const void* gate_up, int64_t rows, int64_t size, int gelu, int threads);

void sluice_rope_and_store(
    int dtype, void* q_out, const void* qkv, const float* cos_sin, const void* q_norm, const void* k_norm, float eps,
    void* k_cache, void* v_cache, int64_t block_stride, int64_t head_stride, int64_t block_size,
    const int64_t* positions, const int64_t* slot_mapping, int64_t tokens, int64_t num_heads, int64_t num_kv_heads,
    int64_t dim, int threads);

// Query heads of one KV head must be no more than `max_group`; `dim` must be a multiple of `head_dim_multiple`. `sinks`,
// unless null, has one more score of each head, to which no value belongs.
void sluice_paged_attention(
    int dtype, void* out, const void* q, const void* k_cache, const void* v_cache, int64_t block_stride,
    int64_t head_stride, int64_t block_size, const int64_t* positions, const int32_t* query_start,
    const int32_t* context_lens, const int32_t* block_tables, int64_t table_width, int64_t num_seqs, int64_t num_heads,
    int64_t num_kv_heads, int64_t dim, float scale, int64_t window, const float* sinks, int threads);
int sluice_max_group();
int sluice_max_head_dim();
int sluice_head_dim_multiple();

// Writes -inf over the fp32 logits of tokens that the mask of a row does not allow: bit t % 32 of word t / 32 is token
// t's. A row of a negative index stays as it is; tokens beyond `words` are not allowed.
void sluice_apply_token_bitmask(
    float* logits, int64_t row_stride, const uint32_t* bitmasks, int64_t words, const int32_t* indices, int64_t rows,
    int64_t vocab, int threads);

// A weight packed in panels of `linear_panel` outputs: it, and what belongs to it, has room for whole panels.
//
// Without `factors` it is [panels, inputs, panel] of `dtype`, which is not fp16, in the order of `sluice_pack_weight`.
// With them it consists of integers q of 4 or 8 bits, and a weight is scale * q + minimum: a block of inputs has its two
// factors in fp16, each of which `steps` multiply anew for each `group` of the block's inputs if they are there. With one
// factor the minimum is 0, or -8 * scale of 4 bits. Integers of 4 bits are unsigned; they are packed
// [panels, words, panel, 2] in words of 16 bits, of which each half of a pair has those of inputs i, i + 2, i + 4, ...
struct PackedLinear {
    const void* weight;
    const uint16_t* factors;   // [panels, blocks, num_factors, panel] fp16, or null
    const int8_t* steps;       // [panels, groups, num_factors, panel], or null
    const float* bias;         // [panels, panel], or null
    const PackedLinear* next;  // whose outputs follow, or null
    int64_t outputs, inputs, bits, group, groups_per_block, num_factors;
};
int sluice_linear_panel();
int64_t sluice_outputs(const PackedLinear* linear);  // of it and all that follow
void sluice_pack_weight(int dtype, void* packed, const void* weight, int64_t outputs, int64_t inputs, int threads);
void sluice_linear(int dtype, void* out, const void* x, const PackedLinear* linear, int64_t rows, int threads);

// Adds the low-rank products of each token's adapter to `out` [tokens, outputs], where x is [tokens, inputs]. `rows` has the
// adapter of each token, -1 for none; `vectors` [adapters, row_stride] begins with the product's places of an adapter: where
// in `memory` each vector begins, -1 for none, those of A of all parts and then those of B, `rank` for each part.
void sluice_adapt(
    int dtype, void* out, const void* x, const int32_t* rows, const int64_t* vectors, int64_t row_stride,
    const void* memory, int64_t rank, const int64_t* part_outputs, int64_t num_parts, int64_t tokens, int64_t inputs,
    int threads);

}  // extern "C"
