"""The settings of the engine, in records by subject: type, unit, default and meaning of each.

A setting that is an option of the engine has the option's name and default (`EngineOptions`).
"""

from typing import Literal

from pydantic import ByteSize

from backend.config import Batching, EngineOptions, KVAllocation, KVCacheDtype, Quantization, Speculate
from gateway.settings.field import (
    BytesOrAuto,
    ChunkOrAuto,
    FractionOrAuto,
    IntOrAuto,
    NameList,
    NameOrAuto,
    PathOrAuto,
    SettingRecord,
    setting,
)
from gateway.settings.machine import spare_cores

OPTIONS = EngineOptions()


class ModelFields(SettingRecord):
    """These settings choose the model that generates, and the models that embed and score beside it."""

    model: NameList = setting(
        "model",
        "[NAME=]MODEL",
        ("embedded",),
        "embedded, smollm2, a local directory in Hugging Face layout, a .gguf file, or a hub name such as "
        "Qwen/Qwen3-0.6B, with or without hf: before it; repeated with a NAME= for requests to choose from, several "
        "models share the device and its KV memory",
        min_length=1,
    )
    awake_bytes: BytesOrAuto = setting(
        "model",
        "BYTES",
        None,
        "memory for weights where several models share a CPU: models that had no request for longest sleep in a file "
        "of the page cache, in the state directory, and wake with the next; auto: all are in memory",
        gt=0,
    )
    served_model_name: NameOrAuto = setting(
        "model", "NAME", None, "the model's name in the API; auto: its own name", min_length=1, max_length=256
    )
    adapter: NameList = setting(
        "model",
        "NAME=[MODEL=]DIR",
        (),
        "an adapter (LoRA) as PEFT saves it, which requests name as their model; MODEL is the served name of the model "
        "that it is of, without which it is the first one's; may be repeated, and a policy says which tenants may use "
        "it",
    )
    adapter_dir: PathOrAuto = setting(
        "model", "DIR", None, "the directory from which admins may load adapters while the gateway serves; auto: none"
    )
    max_adapter_rank: int = setting("model", "N", 16, "the most ranks of an adapter that may be loaded", ge=1, le=256)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "model",
        "DTYPE",
        "auto",
        "precision of weights, and of the KV cache unless --kv-cache-dtype differs; auto: float32 on a CPU, where "
        "then no text depends on its batch; as stored on a GPU",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "model", "DEVICE", "auto", "where the model runs; auto: an NVIDIA GPU if torch finds one, else the CPU"
    )
    max_model_len: IntOrAuto = setting(
        "model",
        "TOKENS",
        OPTIONS.max_model_len,
        "most tokens of prompt and answer together; auto: the model's positions, or the KV memory's capacity",
        ge=2,
    )

    chat_control_tokens: Literal["text", "parsed"] = setting(
        "model",
        "HOW",
        "text",
        "how control tokens (<|im_end|>) are read that a chat's messages, tools or calls spell: text keeps them plain "
        "text; parsed makes them the tokens themselves, by which a quoted page may forge turns of the chat",
    )

    embedding_model: NameOrAuto = setting(
        "model",
        "MODEL",
        None,
        "a model that embeds texts for /v1/embeddings beside the other, named as --model is: BERT, XLM-R or "
        "Qwen3-Embedding in Hugging Face or sentence-transformers layout; auto: none",
    )
    score_model: NameOrAuto = setting(
        "model", "MODEL", None, "a model that scores pairs of texts for /v1/score and /v1/rerank; auto: none"
    )
    embedding_batch_tokens: int = setting(
        "engine", "TOKENS", 8192, "most tokens of inputs to embed or score in one batch", ge=1, le=1_048_576
    )
    embedding_queue_delay: float = setting(
        "engine",
        "SECONDS",
        0.002,
        "longest wait of an input for a larger batch, if the next input is expected soon; 0: no wait",
        ge=0,
        le=1,
    )
    embedding_queue_tokens: int = setting(
        "engine",
        "TOKENS",
        1_048_576,
        "most queued tokens of inputs to embed or score; a request beyond them is refused (503)",
        ge=1,
    )


class SchedulingFields(SettingRecord):
    """These settings decide which requests run, and how many tokens each step computes."""

    max_num_seqs: int = setting("engine", "N", OPTIONS.max_num_seqs, "most sequences in one step", ge=1, le=65_536)
    max_num_batched_tokens: IntOrAuto = setting(
        "engine",
        "TOKENS",
        OPTIONS.max_num_batched_tokens,
        "token budget: most tokens computed in one step; auto: 512, or more where other settings need it",
        ge=1,
        le=1_048_576,
    )
    prefill_chunk: ChunkOrAuto = setting(
        "engine",
        "TOKENS",
        OPTIONS.prefill_chunk,
        "most prompt tokens of one sequence in one step; auto: the token budget; off: every prompt whole",
    )
    calibration: Literal["on", "off"] = setting(
        "engine",
        "on|off",
        "on",
        "on: steps of many shapes are timed, for a second before the first request and then for less than 1 % of the "
        "idle time; tenants are charged by the prices that follow from the measured times",
    )
    prefill_share: float = setting(
        "engine",
        "SHARE",
        1.0,
        "share of the token budget that prompts may fill beside running answers whose class has no target per token; "
        "the rest is a reserve for decodes",
        gt=0,
        le=1,
    )
    spare_share: float = setting(
        "engine",
        "SHARE",
        0.04,
        "share by which the lines of batches may lengthen a step of other requests, within the promises of their "
        "classes: more for more tokens a second, 0 for steps that are no longer than without batches",
        ge=0,
        le=4,
    )
    max_tokens_beyond_context: Literal["clamp", "refuse"] = setting(
        "engine",
        "HOW",
        "clamp",
        "how to answer a request whose prompt and max_tokens exceed the context: clamp: max_tokens is lowered to the "
        "rest of the context (header x-sluice-max-tokens), and the answer ends with length; refuse: a 400",
    )
    default_max_tokens: IntOrAuto = setting(
        "engine",
        "TOKENS",
        None,
        "max_tokens of a request that names none; auto: the rest of the context for a chat, 16 for a completion",
        ge=1,
    )
    tool_followup: float = setting(
        "engine",
        "SECONDS",
        20.0,
        "in which a request that offers tools is expected to be followed by the next, unless its header "
        "x-sluice-expect-followup says; 0: not at all",
        ge=0,
        le=3600,
    )
    max_waiting: int = setting(
        "engine",
        "N",
        1024,
        "most requests that wait for the engine; more are answered 503, unless of a tenant within its equal share; the "
        "policy's classes have bounds of their own, the default ones 256, 1024 and 4096 requests",
        ge=1,
    )
    order: str = setting(
        "engine",
        "HOW",
        "fair",
        "order of requests: fair, by shares of engine time and due times, or fcfs, first come first served; a "
        "checkout has baselines (`sluice simulate`)",
    )
    admit: Literal["forecast", "optimistic"] = setting(
        "engine",
        "HOW",
        "forecast",
        "admission test for KV memory: by a forecast of the running requests' need, or whenever the prompt fits",
    )
    overload: Literal["deadline", "controlled_delay", "bounded", "unbounded"] = setting(
        "engine",
        "HOW",
        "deadline",
        "overload control: refuse requests that would be late (deadline), drop requests that have waited too long "
        "(controlled_delay, as CoDel), or only bound the queue; unbounded lifts max_waiting and the bounds of the "
        "policy's classes, the others keep both",
    )
    batching: Batching = setting(
        "engine",
        "HOW",
        OPTIONS.batching,
        "when a request may join a step, and which of those running it computes; all but the default are baselines to "
        "measure by (see `sluice simulate`)",
    )


class ExecutionFields(SettingRecord):
    """These settings say how steps are computed, and answers constrained."""

    kernels: Literal["auto", "native", "triton", "torch", "reference"] = setting(
        "engine",
        "HOW",
        "auto",
        "native: compiled, CPU; triton: GPU; torch: no compiler needed; reference: slow oracle; auto: the best",
    )
    tensor_parallel: int = setting(
        "engine",
        "N",
        1,
        "ranks that divide the model, each a process with a GPU of its own, or with its part of --threads on a CPU",
        ge=1,
        le=64,
    )
    threads: int = setting(
        "engine",
        "N",
        spare_cores,
        "CPU threads of the model: all cores but one, which serves the clients",
        ge=1,
        le=1024,
    )
    step_timeout: float = setting(
        "engine",
        "SECONDS",
        120.0,
        "time for one step of the model, or twenty times as long as is expected of it where that is more, after which "
        "the device counts as wedged and the process ends with an error",
        ge=1,
        le=86_400,
    )
    grammar_processes: int = setting(
        "engine",
        "N",
        1,
        "processes that match constrained answers, started with the server; 0: structured output is off",
        ge=0,
        le=64,
    )
    grammar_compile_ms: float = setting(
        "engine",
        "MS",
        250.0,
        "most processor time to compile a grammar; a slower one is refused",
        gt=0,
        le=60_000,
    )
    grammar_cache_bytes: ByteSize = setting(
        "engine", "BYTES", ByteSize(64 << 20), "memory for the compiled grammars of one tenant, such as 64MiB", gt=0
    )
    jump_forward: Literal["on", "off"] = setting(
        "engine",
        "on|off",
        "on",
        "on: where a grammar allows one continuation, its tokens are computed together and not sampled one by one",
    )
    speculate: Speculate = setting(
        "engine",
        "HOW",
        OPTIONS.speculate,
        "lookup: where an answer repeats its prompt or itself, the tokens that followed there are drafted and computed "
        "together, as many as are expected to pay, on a CPU; texts that do not depend on the batch stay the same; off: "
        "a step brings one token of an answer",
    )
    quantization: Quantization = setting(
        "engine",
        "HOW",
        OPTIONS.quantization,
        "auto: on a CPU with compiled kernels the quantised weights of a GGUF file stay as they are; none: they are "
        "multiplied out; int8, int4: weights of products are rounded at load, to 8 or 4 bits, on such a CPU or a GPU; "
        "fp8: to e4m3, and stored: those of a GGUF file stay as they are, on a GPU",
    )
    seed: int = setting("engine", "N", 0, "seed of requests without a seed of their own", ge=0, lt=2**63)


class MemoryFields(SettingRecord):
    """These settings size and divide KV memory."""

    kv_cache_dtype: KVCacheDtype = setting(
        "memory",
        "DTYPE",
        OPTIONS.kv_cache_dtype,
        "precision of the KV cache; auto: that of the model; fp8: e4m3 without scales, half of the memory of 16 bits, "
        "rounded to 4 significant bits, which can change texts",
    )
    kv_memory_bytes: BytesOrAuto = setting(
        "memory",
        "BYTES",
        OPTIONS.kv_memory_bytes,
        "memory of the KV cache, such as 512MiB or 2GiB; auto: see --kv-memory-fraction",
        gt=0,
    )
    kv_memory_fraction: FractionOrAuto = setting(
        "memory",
        "FRACTION",
        OPTIONS.kv_memory_fraction,
        "the same as a share of the free memory; auto: a quarter and at most 1 GiB, on a GPU all usable memory",
        gt=0,
        lt=1,
    )
    block_size: int = setting(
        "memory", "TOKENS", OPTIONS.block_size, "tokens in one block of the KV cache", ge=1, le=1024
    )
    prefix_cache: Literal["on", "off"] = setting(
        "memory",
        "on|off",
        "on" if OPTIONS.prefix_cache else "off",
        "on: requests of a tenant share the KV memory of common beginnings of their prompts, also with earlier ones; "
        "--kv-allocation contiguous shares nothing",
    )
    swap_space_bytes: ByteSize = setting(
        "memory",
        "BYTES",
        ByteSize(OPTIONS.swap_space_bytes),
        "host memory to which evicted KV blocks that are worth two copies are swapped, such as 4GiB; 0: evicted blocks "
        "are computed again. On a CPU more --kv-memory-bytes is better: both are the host's",
        ge=0,
    )
    kv_allocation: KVAllocation = setting(
        "memory",
        "HOW",
        OPTIONS.kv_allocation,
        "contiguous reserves a whole context for every sequence: a baseline to measure by",
    )
