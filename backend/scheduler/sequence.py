"""A request as the engine sees it: tokens that are computed and tokens that are not yet."""

from dataclasses import dataclass, field
from enum import Enum, auto

from backend.sampling_params import SamplingParams

PRESSING = 10.0  # seconds: a longer wait, such as a client's timeout of minutes, is no hurry


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # gives up its blocks when its last in-flight step completes, then waits again
    FINISHED = auto()


class FinishReason(Enum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed before its first token, or before its last
    FAILED = "failed"  # the model computed no numbers to draw its next token from
    PREEMPTED = "preempted"  # lost its memory as often as it may, and nobody else could give any


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's own, mutable. Prefill, chunked prefill, decode and recompute after a preemption are one thing:
    `num_computed_tokens` catches up with `num_tokens`.

    Owned by the scheduler from `add` until it is finished; others read it and call the scheduler to change it.
    """

    id: str
    tenant: str  # opaque below admission
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int  # already bounded by the context length
    seed: int
    end_tokens: frozenset[int]  # end it with STOP
    arrival: float = 0.0  # seconds on the engine's clock
    priority_class: int = 0  # 0 is the most urgent
    token_interval: float | None = None  # seconds between tokens that its class promises; None: no promise
    first_token_by: float | None = None  # seconds on the engine's clock; later it is of no use
    done_by: float | None = None  # the same for its last token
    first_token_target: float | None = None  # seconds from its arrival that its class is meant to keep
    head_start: float = 0.0  # seconds by which it counts as older in its queue: a long prompt has to start sooner
    body_bytes: int = 0  # of the request, which are kept while it waits
    promised_first: float | None = None  # seconds from its arrival in which nine in ten such have their first token
    promised_last: float | None = None  # the same for the last

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output, those sampled by steps in flight included
    token_limit: int = field(init=False)  # of `num_tokens`: where it pauses until it may have more
    num_billed_tokens: int = 0  # prompt tokens computed at least once
    num_preemptions: int = 0
    num_yields: int = 0  # preemptions at a limit of its own tenant, or for a step that was lost
    kv_block_seconds: float = 0.0  # blocks held, times how long
    charged: float = 0.0  # to its tenant for completed steps, in the unit of account
    peak_blocks: int = 0  # the most that it held at a time
    num_kept_tokens: int = 0  # output when it was last preempted
    headroom: int = 1  # blocks left to each that runs when it joins; doubled each time that its memory went to others
    turn: int = 0  # slots that anyone had taken by when it arrived, or by when it last took one itself

    # while it holds a slot
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # counted when planned: true once the steps in flight are done
    num_admitted_tokens: int = 0  # prompt and output when it took the slot; whatever follows, the device sampled itself
    in_flight: int = 0  # steps in flight that name it
    last_step: int = -1  # the newest step that names it
    held_since: float = 0.0  # when its blocks were counted last, in seconds of the engine's clock

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt) + len(self.output)
        self.token_limit = self.most_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def most_tokens(self) -> int:
        """The longest it may become."""
        return len(self.prompt) + self.max_tokens

    def block_seconds(self, now: float) -> float:
        """Blocks it held, times how long, until `now`."""
        return self.kv_block_seconds + len(self.block_table) * (now - self.held_since)

    @property
    def is_pressing(self) -> bool:
        """Whether its first token is wanted so soon that others may wait for it."""
        return self.first_token_by is not None and self.first_token_by - self.arrival <= PRESSING

    @property
    def is_newcomer(self) -> bool:
        """Whether it never held a slot before."""
        return self.num_preemptions == self.num_yields == 0

    def limit_to(self, tokens: int) -> None:
        """Let it generate this many tokens for now."""
        self.token_limit = min(len(self.prompt) + tokens, self.most_tokens)

    def extend(self, tokens: int) -> None:
        """Let it generate this many more."""
        self.token_limit = min(self.token_limit + tokens, self.most_tokens)

    def tokens_at(self, start: int, length: int) -> list[int]:
        """Known tokens of positions [start, start + length)."""
        stop = start + length
        offset = len(self.prompt)
        if stop <= offset:
            return self.prompt[start:stop]
        return [*self.prompt[start:], *self.output[max(0, start - offset) : stop - offset]]
