"""Peers of attention: FlashAttention 3's functions are stood in for by the reference, under its real signatures."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from labs.benchmarks.gpu_check import peers
from labs.benchmarks.gpu_check.finding import Finding

CPU = torch.device("cpu")
FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
PLAN = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
"""As vLLM 0.25.1 has them."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: list[int], scale: float, table: Tensor | None
) -> Tensor:
    """What FlashAttention computes, sequence by sequence."""
    out, group, first = torch.empty_like(q), q.shape[1] // k.shape[-2], 0
    for number, length in enumerate(lengths):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        if table is None:
            keys, values = k[first : first + length], v[first : first + length]
            first += length
        else:
            keys, values = (cache[table[number].long()].flatten(0, 1)[:length] for cache in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys.repeat_interleave(group, 1)) * scale
        position = torch.arange(length - scores.shape[1], length).unsqueeze(1)
        scores.masked_fill_(position < torch.arange(length), -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """FlashAttention 3 on a CPU, and what it was asked for."""
    calls: list[str] = []

    def forward(*arguments: object) -> list[Tensor]:
        given = dict(
            zip((one.name for one in torch.ops._vllm_fa3_C.fwd.default._schema.arguments), arguments, strict=True)
        )
        assert (given["is_causal"], given["window_size_left"], given["cp_world_size"]) == (True, -1, 1)
        q, k, v, starts, table, scale = (
            given[name] for name in ("q", "k", "v", "cu_seqlens_q", "page_table", "softmax_scale")
        )
        lengths = given["seqused_k"] if table is not None else given["cu_seqlens_k"].diff()
        calls.append("pages" if table is not None else "together")
        calls.append("planned" if given["scheduler_metadata"] is not None else "unplanned")
        return [attend(q, k, v, starts, lengths.tolist(), scale, table)]

    def plan(*arguments: object) -> Tensor:
        assert arguments[2] == 128
        return torch.zeros(1)

    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(FORWARD)
    library.define(PLAN)
    library.impl("fwd", forward, "CPU")
    library.impl("get_scheduler_metadata", plan, "CPU")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setenv(peers.LIBRARY, "fa3.so")
    yield calls
    library._destroy()


def findings() -> dict[str, Finding]:
    return {finding.what: finding for finding in peers.check_attention(CPU)}


def test_flash_attention_is_asked_for_the_same_as_ours_in_all_its_ways(flash: list[str]) -> None:
    found = findings()
    same = [finding for what, finding in found.items() if what.endswith("difference of a row") and peers.FA3 in what]
    assert len(same) == 9 and all(finding.met for finding in same)
    assert {"pages", "together", "planned", "unplanned"} == set(flash)
    judged = [finding.bound for what, finding in found.items() if what.endswith(f"time of {peers.FA3} / ours")]
    assert judged == [0.95, 0.6]


def test_a_peer_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peers.LIBRARY, raising=False)
    found = findings()
    told = [str(finding.value) for what, finding in found.items() if f"{peers.FA3}, pages of 16" in what]
    assert told and all(value.startswith("not to be had") for value in told)
    assert any("time of torch / ours" in what for what in found)
