"""A sequence is one prompt and its output: tokens computed and tokens not yet computed."""

from dataclasses import dataclass, field
from enum import Enum, auto

from backend.paged_kv.block_names import BlockName
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import TokenLogprobs

DEFAULT_FIRST_TOKEN_S = 2.0  # without a pressing deadline or a class target
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


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its output. Prefill, chunked prefill, decode and recompute after a preemption are one operation:
    `num_computed_tokens` catches up with `num_tokens`.

    Each field has one writer at a time. The maker of a sequence writes the first group, and hands the sequence over
    with `arrive` or `Scheduler.add`. Admission, if there is one, writes the second group before it queues the sequence,
    and keeps `charged` up to date from then on. The scheduler writes all other fields, from `add` until the sequence
    has finished: other modules read them, and call the scheduler to change them.
    """

    # written by the maker
    id: str
    tenant: str  # opaque below admission
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int  # already bounded by the context length
    seed: int
    end_tokens: frozenset[int]  # each ends it with STOP
    arrival: float = 0.0  # seconds on the engine's clock; admission sets it to the time of `arrive`
    priority_class: int = 0  # 0 is the most urgent
    token_interval: float | None = None  # seconds between tokens promised by its class; None: no promise
    first_token_by: float | None = None  # seconds on the engine's clock; a later first token is of no use
    done_by: float | None = None  # the same for its last token
    first_token_target: float | None = None  # seconds from its arrival, the target of its class
    body_bytes: int = 0  # of the request, in memory while it waits
    expects_followup: float | None = None  # seconds from its end to an announced next turn; None: not announced
    cache_root: bytes = b""  # of its block names; sequences with equal roots may share blocks; empty: no sharing
    block_names: list[BlockName] = field(default_factory=list)  # of its full blocks; output's names come later
    grammar: str | None = None  # the name of its grammar in logs; None: free text
    logprobs: list[TokenLogprobs] | None = None  # of its output, token by token, as it grows; None: not requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # of its prompt from the second token on, one list per group
    prompt_group: str | None = None  # a tenant's sequences of one group have one prompt and fork from one prefill

    # written by admission
    first_token_estimate: float | None = None  # seconds from arrival, the ninetieth percentile
    last_token_estimate: float | None = None  # the same for the last token
    charged: float = 0.0  # engine seconds, to its tenant for completed steps

    # written by the scheduler
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output, tokens that steps in flight sample included
    most_tokens: int = field(init=False)  # upper bound of `num_tokens`, prompt included
    token_limit: int = field(init=False)  # of `num_tokens`: the sequence pauses there; its maker may lower it
    num_prefilled_tokens: int = 0  # prompt tokens computed at least once, found in the prefix cache, or forked
    num_cached_tokens: int = 0  # of them, tokens found or forked and never computed for this sequence
    num_preemptions: int = 0  # to free memory or a slot for other sequences
    num_yields: int = 0  # preemptions at a limit of its own tenant, or after a lost step
    kv_block_seconds: float = 0.0  # blocks charged to its tenant on its account, times seconds
    num_jumped_tokens: int = 0  # output tokens forced by its grammar and accepted together with a sampled token
    peak_blocks: int = 0  # most blocks held at a time
    num_kept_tokens: int = 0  # output tokens at its last preemption
    num_pinned_tokens: int = 0  # prompt tokens pinned in the prefix cache when it arrived
    num_lost_tokens: int = 0  # most computed tokens at any preemption
    num_told_names: int = 0  # of `block_names`, names given at arrival or reported by `BlockTables.newly_named`
    watermark: int = 1  # free blocks for each running sequence that its admission requires; see `KVManager`
    admission_number: int = 0  # count of admissions of all sequences at its arrival, or at its own last admission

    # written by the scheduler while it holds a slot
    slot: int = -1  # row of device state; -1: none
    block_table: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0  # of its table, blocks also held by other sequences
    num_charged_blocks: int = 0  # of its table, blocks charged on its account; other accounts pay for the rest
    num_computed_tokens: int = 0  # counted at planning: computed once the steps in flight complete
    num_admitted_tokens: int = 0  # known when it took the slot or last jumped; the device sampled all later ones
    jumps: bool = False  # forced tokens are not computed yet
    num_redundant: int = 0  # tokens that steps in flight sample but are known already
    last_step: int = -1  # the newest step with a row of it that was not lost
    held_since: float = 0.0  # when its block-seconds were last counted, seconds of the engine's clock

    def __post_init__(self) -> None:
        if self.sampling.logprobs is not None:
            self.logprobs = []
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.num_tokens = len(self.prompt) + len(self.output)
        self.most_tokens = self.token_limit = len(self.prompt) + self.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_unpaid_blocks(self) -> int:
        """Blocks of its table charged on the account of another sequence of its tenant."""
        return len(self.block_table) - self.num_charged_blocks

    def block_seconds(self, now: float) -> float:
        """Return block-seconds charged to its tenant on its account until `now`.

        A block shared by several sequences of a tenant is on one account at a time, so that the accounts add up to the
        blocks the tenant held.
        """
        return self.kv_block_seconds + self.num_charged_blocks * (now - self.held_since)

    @property
    def num_billed_tokens(self) -> int:
        """Prompt tokens computed for this sequence, each counted once: a recompute is free for the tenant."""
        return self.num_prefilled_tokens - self.num_cached_tokens

    def num_new_tokens(self, start: int, length: int) -> int:
        """Return the number of tokens in [start, start + length) that no preemption had lost."""
        return max(0, start + length - max(start, self.num_lost_tokens))

    @property
    def is_pressing(self) -> bool:
        """True if its first-token deadline is at most `PRESSING_WAIT_S` after its arrival."""
        return self.first_token_by is not None and self.first_token_by - self.arrival <= PRESSING_WAIT_S

    @property
    def is_newcomer(self) -> bool:
        """True if it has never been preempted."""
        return self.num_preemptions == self.num_yields == 0

    def limit_to(self, tokens: int) -> None:
        """Set the limit of its output to `tokens`."""
        self.token_limit = min(len(self.prompt) + tokens, self.most_tokens)

    def extend(self, tokens: int) -> None:
        """Raise the limit of its output by `tokens`."""
        self.token_limit = min(self.token_limit + tokens, self.most_tokens)

    def tokens_at(self, start: int, length: int) -> list[int]:
        """Return the token ids at positions [start, start + length), all known to the host."""
        stop = start + length
        offset = len(self.prompt)
        if stop <= offset:
            return self.prompt[start:stop]
        return [*self.prompt[start:], *self.output[max(0, start - offset) : stop - offset]]
