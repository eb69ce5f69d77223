"""A sequence is one prompt and its output: tokens computed and tokens not yet computed."""

from dataclasses import dataclass, field
from enum import Enum, auto

from backend.adapter import Adapter
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.block_table import BlockTable
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import TokenLogprobs

DEFAULT_FIRST_TOKEN_S = 2.0  # without a pressing deadline or a class target
SPARE_CLASS = 16
"""The spare class, below every class of a policy: a step computes its sequences in the time that others leave, and they
give their slots and blocks to any other sequence at once.
"""
PRESSING_WAIT_S = 10.0  # a longer wait, for example a client's timeout of minutes, is not urgent


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # its blocks are freed when its last step in flight completes; then it waits again
    FINISHED = auto()


class FinishReason(Enum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # a deadline, for its first token or its last, passed
    FAILED = "failed"  # the model computed no finite logits for its next token
    GRAMMAR = "grammar"  # its grammar allows no next token, or the allowed tokens take too much work to find
    PREEMPTED = "preempted"  # it reached the limit of preemptions, and no other sequence could free memory


@dataclass(slots=True, eq=False)  # one is made for each prompt; frozen, making it takes six times as long
class PromptRequest:
    """One prompt of a request as it came, and what its tenant's class promises it: nothing changes it. Moments are in
    seconds of the engine's clock.
    """

    id: str
    tenant: str  # opaque below admission
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int  # already bounded by the context length
    seed: int
    end_tokens: frozenset[int]  # each ends it with STOP
    priority_class: int = 0  # 0 is the most urgent
    token_interval: float | None = None  # seconds between tokens promised by its class; None: no promise
    first_token_by: float | None = None  # a later first token is of no use
    done_by: float | None = None  # the same for its last token
    first_token_target: float | None = None  # seconds from its arrival, the target of its class
    body_bytes: int = 0  # in memory while it waits
    expects_followup: float | None = None  # seconds from its end to an announced next turn; None: not announced
    grammar: str | None = None  # the name of its grammar in logs; None: free text
    adapter: Adapter | None = None  # None: the model alone
    model: int = 0  # its model's number, in the order of the settings

    @property
    def most_tokens(self) -> int:
        """Upper bound of its tokens, prompt included."""
        return len(self.prompt) + self.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's prompt and its output. Prefill, chunked prefill, decode and recompute after a preemption are one
    operation: `num_computed_tokens` catches up with `num_tokens`.

    Its maker writes the first group, and hands the sequence over with `arrive` or `Scheduler.add`. From then on the
    scheduler alone writes it, until it has finished: other modules read it, and call the scheduler to change it.
    """

    request: PromptRequest
    tenant: str = field(init=False)  # of the request
    arrival: float = 0.0  # seconds on the engine's clock; `arrive` sets it
    prompt_group: str | None = None  # a tenant's sequences of one group have one prompt and fork from one prefill
    cache_root: bytes = b""  # of its block names; sequences with equal roots may share blocks; empty: no sharing
    block_names: list[BlockName] = field(default_factory=list)  # of its full blocks; output's names come later
    token_limit: int = field(init=False)  # of `num_tokens`: the sequence pauses there; its maker may lower it

    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # of its output, token by token, as it grows; None: not requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # of its prompt from the second token on, one list per group
    num_tokens: int = field(init=False)  # prompt and output, tokens that steps in flight sample included
    num_prefilled_tokens: int = 0  # prompt tokens computed at least once, found in the prefix cache, or forked
    num_cached_tokens: int = 0  # of them, tokens found or forked and never computed for this sequence
    num_preemptions: int = 0  # to free memory or a slot for other sequences
    num_yields: int = 0  # preemptions at a limit of its own tenant, or after a lost step
    num_kept_tokens: int = 0  # output tokens at its last preemption
    num_found_tokens: int = 0  # prompt tokens that were cached when it arrived; 0 once it has a slot
    num_lost_tokens: int = 0  # most computed tokens at any preemption
    watermark: int = 1  # free blocks for each running sequence that its admission requires; see `BlockTables`
    admission_number: int = 0  # count of admissions of all sequences at its arrival, or at its own last admission

    # while it holds a slot
    slot: int = -1  # row of device state; -1: none
    block_table: BlockTable = field(init=False)
    adapter_table: BlockTable | None = field(init=False)  # the blocks of its adapter's weights; None: it has none
    num_computed_tokens: int = 0  # counted at planning: computed once the steps in flight complete
    num_admitted_tokens: int = 0  # known when it took the slot or last jumped; the device sampled all later ones
    jumps: bool = False  # forced tokens are not computed yet
    num_redundant: int = 0  # tokens that steps in flight sample but are known already
    last_step: int = -1  # the newest step with a row of it that was not lost

    def __post_init__(self) -> None:
        request = self.request
        self.tenant = request.tenant
        self.logprobs = None if request.sampling.logprobs is None else []
        self.prompt_logprobs = None if request.sampling.prompt_logprobs is None else []
        self.num_tokens, self.token_limit = len(request.prompt), request.most_tokens
        self.block_table = BlockTable(request.id, request.tenant)
        self.adapter_table = None if request.adapter is None else BlockTable(request.id, request.tenant)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_spare(self) -> bool:
        return self.request.priority_class >= SPARE_CLASS

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """True while tokens that were known when it took its slot, or last jumped, are not computed yet."""
        return self.num_computed_tokens < self.num_admitted_tokens

    @property
    def num_billed_tokens(self) -> int:
        """Prompt tokens computed for this sequence, each counted once: a recompute is free for the tenant."""
        return self.num_prefilled_tokens - self.num_cached_tokens

    def block_seconds(self, now: float) -> float:
        """Return the block-seconds charged for it until `now`: for its keys and values, and for its adapter."""
        return sum([table.seconds(now) for table in self.tables])

    @property
    def tables(self) -> list[BlockTable]:
        """The tables of all blocks that it holds."""
        return [table for table in (self.block_table, self.block_table.window, self.adapter_table) if table is not None]

    @property
    def peak_blocks(self) -> int:
        """The most blocks at a time of its keys and values: of its text and, at another time perhaps, of its window."""
        text = self.block_table
        return text.peak + (0 if text.window is None else text.window.peak)

    @property
    def num_unpaid_blocks(self) -> int:
        """Blocks of its keys and values charged on other accounts of its tenant."""
        text = self.block_table
        return text.num_unpaid + (0 if text.window is None else text.window.num_unpaid)

    @property
    def num_blocks(self) -> int:
        """The blocks of its keys and values."""
        text = self.block_table
        return len(text.blocks) + (0 if text.window is None else len(text.window.blocks))

    @property
    def is_pressing(self) -> bool:
        """True if its first-token deadline is at most `PRESSING_WAIT_S` after its arrival."""
        by = self.request.first_token_by
        return by is not None and by - self.arrival <= PRESSING_WAIT_S

    @property
    def is_newcomer(self) -> bool:
        """True if it has never been preempted."""
        return self.num_preemptions == self.num_yields == 0

    def limit_to(self, tokens: int) -> None:
        """Set the limit of its output to `tokens`."""
        self.token_limit = min(self.num_prompt_tokens + tokens, self.request.most_tokens)

    def raise_limit(self, tokens: int) -> None:
        """Raise the limit of its output by `tokens`."""
        self.token_limit = min(self.token_limit + tokens, self.request.most_tokens)

    def tokens_at(self, start: int, length: int) -> list[int]:
        """Return the token ids at positions [start, start + length), all known to the host."""
        stop, prompt = start + length, self.request.prompt
        offset = len(prompt)
        if stop <= offset:
            return prompt[start:stop]
        return [*prompt[start:], *self.output[max(0, start - offset) : stop - offset]]
