"""The settings of the engine: type, unit, default and meaning of each."""

from typing import Literal

from pydantic import ByteSize
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.settings.field import (
    ENV_PREFIX,
    BytesOrAuto,
    ChunkOrAuto,
    FractionOrAuto,
    IntOrAuto,
    NameOrAuto,
    SecondsOrAuto,
    Sizes,
    setting,
)
from gateway.settings.machine import spare_cores


class EngineFields(BaseSettings):
    """The settings of the model, the engine and its memory; they are frozen and read once at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    model: str = setting(
        "model",
        "MODEL",
        "embedded",
        "embedded, smollm2, a local directory in Hugging Face layout, a .gguf file, or a hub name such as "
        "Qwen/Qwen3-0.6B, with or without hf: before it",
        min_length=1,
    )
    served_model_name: NameOrAuto = setting(
        "model", "NAME", None, "the name clients ask for; auto: the model's own name", min_length=1, max_length=256
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "model",
        "DTYPE",
        "auto",
        "precision of weights, and of the KV cache unless --kv-cache-dtype says another; auto: float32 on a CPU, where "
        "then no text depends on its batch; as stored on a GPU",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "model", "DEVICE", "auto", "where the model runs; auto: an NVIDIA GPU if torch finds one, else the CPU"
    )
    max_model_len: IntOrAuto = setting(
        "model",
        "TOKENS",
        None,
        "most tokens of prompt and answer together; auto: the model's positions, or what KV memory holds",
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
        "longest wait of an input for others, where the next is expected soon; 0: each batch is what waits already",
        ge=0,
        le=1,
    )
    embedding_queue_tokens: int = setting(
        "engine",
        "TOKENS",
        1_048_576,
        "most tokens of inputs to embed or score that may wait; beyond them a request is refused (503)",
        ge=1,
    )

    max_num_seqs: int = setting("engine", "N", 256, "most sequences in one step", ge=1, le=65_536)
    max_num_batched_tokens: IntOrAuto = setting(
        "engine",
        "TOKENS",
        None,
        "token budget: most tokens computed in one step; auto: 512, or more where other settings need it",
        ge=1,
        le=1_048_576,
    )
    prefill_chunk: ChunkOrAuto = setting(
        "engine",
        "TOKENS",
        None,
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
        "who goes next: fair, by shares of engine time and due times, or fcfs, first come first served; a checkout has "
        "more to compare with (`sluice simulate`)",
    )
    admit: Literal["forecast", "minimum_free", "optimistic"] = setting(
        "engine",
        "HOW",
        "forecast",
        "when a request gets KV memory: by a forecast of what those running will need, while --min-free-blocks are "
        "free, or whenever its prompt fits",
    )
    min_free_blocks: int = setting("engine", "N", 0, "KV blocks that --admit minimum_free leaves free", ge=0)
    overload: Literal["deadline", "controlled_delay", "bounded", "unbounded"] = setting(
        "engine",
        "HOW",
        "deadline",
        "overload control: refuse requests that would be late (deadline), drop requests that have waited too long "
        "(controlled_delay, as CoDel), or only bound the queue; unbounded lifts max_waiting and the bounds of the "
        "policy's classes, the others keep both",
    )
    batching: Literal[
        "continuous",
        "static",
        "static_padded",
        "slai",
        "window",
        "prefill_first",
        "wait",
        "nested_wait",
        "multilevel_feedback",
    ] = setting(
        "engine",
        "HOW",
        "continuous",
        "when a request may join a step, and which of those running it computes: window gathers requests of one token "
        "of output, such as scores; the others are baselines to measure by (see `sluice simulate`)",
    )
    max_batch_delay: SecondsOrAuto = setting(
        "engine",
        "SECONDS",
        None,
        "time for which --batching window gathers requests, or wait lets them wait for others; auto: 0.005, and 0.05",
        ge=0,
        le=10,
    )
    preferred_batch_sizes: Sizes = setting(
        "engine",
        "N,N",
        (),
        "sizes at which a batch that --batching window gathers starts at once; none: --max-num-seqs",
    )
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
        "processes that match constrained answers, started with the server; 0: none may be asked for",
        ge=0,
        le=64,
    )
    grammar_compile_ms: float = setting(
        "engine",
        "MS",
        250.0,
        "processor time in which a grammar has to be compiled; one that takes more is refused",
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
    seed: int = setting(
        "engine", "N", 0, "seeds the sampling of requests that bring no seed of their own", ge=0, lt=2**63
    )

    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "memory",
        "DTYPE",
        "auto",
        "precision of the KV cache; auto: that of the model; fp8: e4m3 without scales, half of the memory of 16 bits, "
        "rounded to 4 significant bits, which can change texts",
    )
    kv_memory_bytes: BytesOrAuto = setting(
        "memory", "BYTES", None, "memory of the KV cache, such as 512MiB or 2GiB; auto: see --kv-memory-fraction", gt=0
    )
    kv_memory_fraction: FractionOrAuto = setting(
        "memory",
        "FRACTION",
        None,
        "the same as a share of the free memory; auto: a quarter and at most 1 GiB, on a GPU all that can be used",
        gt=0,
        lt=1,
    )
    block_size: int = setting("memory", "TOKENS", 16, "tokens in one block of the KV cache", ge=1, le=1024)
    prefix_cache: Literal["on", "off"] = setting(
        "memory",
        "on|off",
        "on",
        "on: requests of a tenant share the KV memory of what their prompts begin with, and find there what earlier "
        "ones have left; --kv-allocation contiguous shares nothing",
    )
    swap_space_bytes: ByteSize = setting(
        "memory",
        "BYTES",
        ByteSize(0),
        "host memory to which evicted KV blocks that are worth two copies are swapped, such as 4GiB; 0: evicted blocks "
        "are computed again. On a CPU more --kv-memory-bytes is better: both are the host's",
        ge=0,
    )
    kv_allocation: Literal["paged", "contiguous"] = setting(
        "memory", "HOW", "paged", "contiguous reserves a whole context for every sequence: a baseline to measure by"
    )
