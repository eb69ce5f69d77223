"""The setup of a grammar process: limits, and the layout of the memory that it shares with the engine."""

from dataclasses import dataclass

from backend.structured_output.frames import HEAD_INTS, NEW_SLOT_INTS, ROW_INTS

MAX_FORCED_TOKENS = 64  # of one slot that a question is answered with


@dataclass(frozen=True, slots=True)
class StructuredOutputOptions:
    """The limits of constrained answers."""

    num_processes: int = 1  # that match; 0 refuses every constrained answer
    jump_forward: bool = True  # tokens that a grammar forces are not sampled one by one
    compile_seconds: float = 0.25  # processor seconds after which a compiling process is killed
    compile_bytes: int = 256 << 20  # the most that compiling a grammar may take
    match_bytes: int = 2 << 30  # the most that matching may take, in each process


class SharedLayout:
    """The shared memory: the offset of each part, in words of 32 bits. Most parts have an entry for each slot.

    The engine writes questions, outputs and newest tokens. The matching process writes the rest before it answers, and
    copies the newest tokens to the outputs. Unwritten pages take no memory.
    """

    def __init__(self, num_seqs: int, max_model_len: int, num_words: int, num_processes: int) -> None:
        self.num_words = num_words  # of a mask
        self.max_model_len = max_model_len
        self.nanoseconds = 0  # [slots] of 64 bits: processor time of the slot's rows since the start
        self.masks = 2 * num_seqs  # [slots, words]; bit t % 32 of word t // 32: token t is allowed
        self.newest = self.masks + num_seqs * num_words  # [slots], tokens
        self.statuses = self.newest + num_seqs  # [slots], of `RowStatus`
        self.num_forced = self.statuses + num_seqs  # [slots]
        self.forced = self.num_forced + num_seqs  # [slots, MAX_FORCED_TOKENS], tokens that the grammar forces next
        self.working_on = self.forced + num_seqs * MAX_FORCED_TOKENS  # [processes], the slot that each works on, or -1
        self.question_ints = HEAD_INTS + num_seqs * (NEW_SLOT_INTS + ROW_INTS)  # at most
        self.questions = self.working_on + num_processes  # [processes, question_ints], laid out as in `frames`
        self.outputs = self.questions + num_processes * self.question_ints  # [slots, max_model_len], tokens
        self.num_bytes = 4 * (self.outputs + num_seqs * max_model_len)


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The first frame to a grammar process, in JSON."""

    tokenizer_path: str
    vocab_size: int
    end_tokens: list[int]
    max_num_seqs: int
    max_model_len: int
    options: StructuredOutputOptions

    @property
    def layout(self) -> SharedLayout:
        """The layout of the shared memory."""
        num_words = -(-self.vocab_size // 32)
        return SharedLayout(self.max_num_seqs, self.max_model_len, num_words, self.options.num_processes)
