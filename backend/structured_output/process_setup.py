"""What a grammar process is told when it starts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StructuredOutputOptions:
    """What constrained answers may take."""

    num_processes: int = 1  # that match; 0: no answer is constrained
    jump_forward: bool = True  # tokens that a grammar forces are not sampled one by one
    compile_seconds: float = 0.25  # of a processor, after which a process that compiles is killed
    compile_bytes: int = 256 << 20  # that compiling a grammar may take
    match_bytes: int = 2 << 30  # that matching may take, in each process


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """Says what a grammar process has to know, as its first frame in JSON."""

    tokenizer_path: str
    vocab_size: int
    end_tokens: list[int]
    max_num_seqs: int
    options: StructuredOutputOptions

    @property
    def num_words(self) -> int:
        """The 32-bit words of a mask."""
        return -(-self.vocab_size // 32)

    @property
    def shared_bytes(self) -> int:
        """Return the size of the memory that all share: a mask for each slot, and of each process that matches the slot
        that it is working on.
        """
        return 4 * (self.max_num_seqs * self.num_words + self.options.num_processes)
