"""The messages between the planner and the device: the work of one step, and its output.

Both are plain data about slots (a slot is a sequence's row of device state), so that they could cross a process.
"""

from dataclasses import dataclass, field, replace

from backend.sampling_params import SamplingParams


@dataclass(slots=True)
class NewSequence:
    """A sequence takes a slot; the device keeps this immutable record until the slot is taken again."""

    slot: int
    sampling: SamplingParams
    seed: int
    token_ids: list[int]  # prompt, then the output generated before a preemption
    num_prompt_tokens: int
    adapter: tuple[int, list[int]] | None = None  # its number and the blocks in which it lies; None: the model alone


@dataclass(slots=True)
class Batch:
    """One step as a structure of arrays: a row for each sequence, decodes first, each part in the order of admission.

    Row i computes tokens [starts[i], starts[i] + lengths[i]) of its sequence. A decode computes the token that its
    slot sampled last, which the host may not know yet; `token_ids` holds the prefill tokens, row after row, and before
    them those of decodes if the step only is timed.
    `sampled` lists the rows whose last token is followed by a sampled one: all decodes, and prefills that are complete.
    A row is listed again for each fork, an answer of another slot to the same prompt, and `forks` says which slot; the
    last block of the prompt, if it is not full, is copied for it after the step's rows.

    Rows of `padding` compute discarded tokens over the beginning of a slot's context, and store nothing.

    After a lost step, the next one repeats sequences and block tables that the device may not know. The device may know
    some of them already.

    Swaps are ordered among themselves, over all steps, and a step's swaps precede its rows. They may start as soon as
    the step is launched, beside earlier steps in flight, because no swap touches a block that an earlier step reads or
    writes: a block is freed only after the last step that names its holders has completed.
    """

    step: int
    num_decodes: int = 0
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # slot, index in its table, blocks
    admitted: list[NewSequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # block, host block; copied first, in any order
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host block, block; after `swap_out`, in order
    # number of an adapter, index of a block of its weights, block; copied after the swaps and before the rows
    adapter_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)  # index in `sampled`, slot
    # index in `sampled`, the tokens behind the sampled row's last known one: its row samples at each of them as well
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # source block, destination block; after the rows
    # slot, first place in its table, a block of each group of layers with a window for each place from there to the end
    window_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    padding: list[tuple[int, int, int]] = field(default_factory=list)  # discarded rows: slot, start, length
    model: int = 0  # all rows are of one model; other models' blocks may be swapped
    asleep: tuple[int, ...] = ()  # models whose weights are not in memory from this step on
    stores: bool = True  # False: keys and values are computed only for timing, and not stored

    @property
    def sampled_slots(self) -> list[int]:
        """The slot of each entry in `sampled`."""
        slots = [self.slots[row] for row in self.sampled]
        for index, slot in self.forks:
            slots[index] = slot
        return slots

    @property
    def drawn_slots(self) -> list[int]:
        """The slot of each drawn token: of those in `sampled`, then of those behind drafted tokens."""
        slots = self.sampled_slots
        return [*slots, *[slots[index] for index, draft in self.drafts for _ in draft]]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, padding included."""
        return sum(self.lengths) + sum([length for _, _, length in self.padding])

    def padded(self) -> "Batch":
        """Return the batch with the padding rows behind the others."""
        if not self.padding:
            return self
        slots, starts, lengths = map(list, zip(*self.padding, strict=True))
        return replace(
            self,
            slots=self.slots + slots,
            starts=self.starts + starts,
            lengths=self.lengths + lengths,
            token_ids=self.token_ids + [0] * sum(lengths),
        )

    @property
    def num_copies(self) -> int:
        """The blocks that are copied to the host's memory or back."""
        return len(self.swap_out) + len(self.swap_in)


NO_TOKEN = -1
NO_TOKEN_ALLOWED = -2


@dataclass(slots=True)
class TokenLogprobs:
    """The log probabilities of one token and of the most likely ones in its place, natural, of the model's own logits:
    before temperature, penalties, biases and masks.
    """

    logprob: float  # of the token
    rank: int  # of the token; 1: there is none more likely
    token_ids: list[int]  # the most likely, in falling order
    logprobs: list[float]  # theirs


@dataclass(slots=True)
class PromptLogprobs:
    """The log probabilities of a stretch of one sequence's prompt."""

    slot: int
    start: int  # position of the first token, at least 1: nothing precedes the one at 0
    tokens: list[TokenLogprobs]


@dataclass(slots=True)
class StepOutput:
    """The tokens that a step sampled, one for each of `Batch.sampled`, and the duration of the step.

    Immutable. A token is `NO_TOKEN` where the logits are not finite (NaN, or an overflow of their type), and
    `NO_TOKEN_ALLOWED` where the row's token mask, of a grammar for example, allows no token, or takes too much work to
    compute.

    `elapsed` is in seconds, from the completion of the step before it (or its own launch, if later) to its own
    completion, so that the times of consecutive steps add up to the time the device was busy.
    """

    step: int
    token_ids: list[int]
    elapsed: float
    logprobs: dict[int, TokenLogprobs] | None = None  # by index in `token_ids`, of rows that ask; None: of none
    prompt_logprobs: list[PromptLogprobs] | None = None  # of rows that compute a part of a prompt, and ask
    # by index in `token_ids`, the tokens that follow: forced by a grammar, or drawn behind accepted drafts; None: none
    forced: dict[int, list[int]] | None = None
    forced_logprobs: dict[int, list[TokenLogprobs]] | None = None  # of them, of drafted rows that ask


@dataclass(slots=True)
class Counters:
    """Totals since start; they never go down."""

    admissions: int = 0  # a sequence that was preempted counts each time
    prompt_tokens: int = 0  # computed for the first time
    cached_tokens: int = 0  # of prompts, found in the prefix cache or forked, and not computed
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0
    jump_forward_tokens: int = 0  # of `generation_tokens`, forced by grammars
    padding_tokens: int = 0  # discarded tokens of padded static batches
    late_tokens: int = 0  # sampled after their sequence had ended; discarded
    preemptions: int = 0  # for the memory or the slot of others
    slot_preemptions: int = 0  # of `preemptions`, for a slot
    swapped_out: int = 0  # blocks copied to the host's memory
    swapped_in: int = 0  # and back
    lost_steps: int = 0  # for lack of memory on the device
    yields: int = 0  # preemptions of a tenant's youngest for its oldest, at a limit of its own
    rollback_preemptions: int = 0  # because a step was lost

    @property
    def all_preemptions(self) -> tuple[int, int, int, int]:
        """Preemptions for others' memory and slots, at a limit of the tenant's own, and because a step was lost."""
        slots = self.slot_preemptions
        return self.preemptions - slots, slots, self.yields, self.rollback_preemptions
