"""A sequence is one prompt and its output, as the engine sees them: tokens computed, and tokens not yet computed."""

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
    EXPIRED = "expired"  # its deadline passed before its first token, or before its last
    FAILED = "failed"  # the model computed no numbers to draw its next token from
    GRAMMAR = "grammar"  # no token may follow by its grammar, or it takes too much work to say which
    PREEMPTED = "preempted"  # it was preempted as often as it may be, and no other sequence could free memory


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its output. Prefill, chunked prefill, decode and recompute after a preemption are one thing:
    `num_computed_tokens` catches up with `num_tokens`.

    Each field has one writer at a time. The maker of a sequence writes the first group, and hands the sequence over
    with `arrive` or `Scheduler.add`. Admission, if there is one, writes the second group before it queues the sequence,
    and keeps `charged` up to date from then on. The scheduler writes all other fields, from `add` until the sequence
    has finished: others read it, and call the scheduler to change it.
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
    token_interval: float | None = None  # seconds between tokens that its class promises; None: no promise
    first_token_by: float | None = None  # seconds on the engine's clock; a later first token is of no use
    done_by: float | None = None  # the same for its last token
    first_token_target: float | None = None  # seconds from its arrival that its class is meant to keep
    body_bytes: int = 0  # of the request, which are kept while it waits
    expects_followup: float | None = None  # seconds after its end in which its client says it comes again; None: none
    cache_root: bytes = b""  # of the names of its blocks: who has the same may share them; empty: it shares none
    block_names: list[BlockName] = field(default_factory=list)  # of its full blocks; those of output are added later
    grammar: str | None = None  # the name in logs of what its answer has to match; None: it may be any text
    logprobs: list[TokenLogprobs] | None = None  # of its output, token by token, filled as it grows; None: not asked
    prompt_logprobs: list[TokenLogprobs] | None = None  # of its prompt from the second token on, a list of its group
    prompt_group: str | None = None  # those of a tenant that have the same have one prompt, and start from one prefill

    # written by admission
    first_token_estimate: float | None = None  # seconds from arrival, in which nine in ten have it
    last_token_estimate: float | None = None  # the same for the last token
    charged: float = 0.0  # to its tenant for completed steps, in the unit of account

    # written by the scheduler
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output, tokens that steps in flight sample included
    most_tokens: int = field(init=False)  # that it may come to have, prompt included
    token_limit: int = field(init=False)  # of `num_tokens`: it pauses there; its maker may lower it
    num_prefilled_tokens: int = 0  # prompt tokens computed at least once, found in the prefix cache, or forked
    num_cached_tokens: int = 0  # those of them that were found or forked, and never computed for it
    num_preemptions: int = 0  # for the memory or the slot of others
    num_yields: int = 0  # preemptions at a limit of its own tenant, or for a step that was lost
    kv_block_seconds: float = 0.0  # blocks that its tenant was charged for on its account, times how long
    num_jumped_tokens: int = 0  # of its output, forced by its grammar and taken with others
    peak_blocks: int = 0  # the most that it held at a time
    num_kept_tokens: int = 0  # output tokens when it was last preempted
    num_pinned_tokens: int = 0  # prompt tokens that the prefix cache kept for it when it came
    num_lost_tokens: int = 0  # the most tokens that were computed when it was preempted
    num_told_names: int = 0  # of `block_names`, those that it came with or that `KVManager.newly_named` has told
    watermark: int = 1  # blocks that must stay free for each running sequence when it is admitted; see `KVManager`
    admission_number: int = 0  # admissions of any sequence so far when it arrived, or was last admitted itself

    # written by the scheduler while it holds a slot
    slot: int = -1  # row of device state; -1: it holds none
    block_table: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0  # of its table, those that others hold as well
    num_charged_blocks: int = 0  # those that its tenant is charged for on its account: of its own, others pay for some
    num_computed_tokens: int = 0  # counted when planned: true once the steps in flight are done
    num_admitted_tokens: int = 0  # known when it took the slot, or last jumped; the device sampled all that follow
    jumps: bool = False  # tokens were forced that are not computed yet, and not sampled one by one
    num_redundant: int = 0  # of the tokens that steps in flight sample, those that are known by now
    last_step: int = -1  # the newest step that names it, and was not lost
    held_since: float = 0.0  # when its block-seconds were last counted, in seconds of the engine's clock

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
        """The blocks of its table for which its tenant is charged on the account of another sequence."""
        return len(self.block_table) - self.num_charged_blocks

    def block_seconds(self, now: float) -> float:
        """Return the blocks that its tenant was charged for on its account, times how long, until `now`.

        A block that several sequences of a tenant share is on the account of one of them at a time, so that theirs add
        up to what the tenant held.
        """
        return self.kv_block_seconds + self.num_charged_blocks * (now - self.held_since)

    @property
    def num_billed_tokens(self) -> int:
        """The prompt tokens that were computed for it, each once: recomputing is not the tenant's doing."""
        return self.num_prefilled_tokens - self.num_cached_tokens

    def num_new_tokens(self, start: int, length: int) -> int:
        """Return how many of `length` tokens from `start` on are computed for the first time, not recomputed."""
        return max(0, start + length - max(start, self.num_lost_tokens))

    @property
    def is_pressing(self) -> bool:
        """True if its first token is due so soon that others may wait for it."""
        return self.first_token_by is not None and self.first_token_by - self.arrival <= PRESSING_WAIT_S

    @property
    def is_newcomer(self) -> bool:
        """True if it has never held a slot and lost it."""
        return self.num_preemptions == self.num_yields == 0

    def limit_to(self, tokens: int) -> None:
        """Let it generate this many tokens for now."""
        self.token_limit = min(len(self.prompt) + tokens, self.most_tokens)

    def extend(self, tokens: int) -> None:
        """Let it generate this many more tokens."""
        self.token_limit = min(self.token_limit + tokens, self.most_tokens)

    def tokens_at(self, start: int, length: int) -> list[int]:
        """Return the token ids at positions [start, start + length), all of which the host knows."""
        stop = start + length
        offset = len(self.prompt)
        if stop <= offset:
            return self.prompt[start:stop]
        return [*self.prompt[start:], *self.output[max(0, start - offset) : stop - offset]]
