"""The embedded model's training text: conversations over its skills, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from benchmarks.skills import training_example
from benchmarks.small_talk import small_talk
from scripts.embedded_tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER

IGNORED = -100  # the label that the loss leaves out
POOL_SIZE = 512
SMALL_TALK_SHARE = 0.06
SYSTEM_SHARE = 0.25
PLAIN_SHARE = 0.08
TURNS, TURN_WEIGHTS = (1, 2, 3, 4), (70, 16, 9, 5)
SKILL_WEIGHTS = {
    "count_up": 12, "count_down": 10, "count_by": 10, "days": 10, "months": 9, "alphabet": 9, "repeat": 13, "add": 22,
    "story": 5,
}  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful, honest and concise assistant.", "Be brief.", "You are Sluice.",
    "Answer exactly.", "You are a teacher for small children.", "Answer the user's question.", "You are a poet.",
    "Reply in English.", "You are a friendly robot.", "Follow the instructions of the user.", "Today is Monday.",
    "You are an expert in numbers.", "Do not explain your answer.", "You are a customer support agent of a shop.",
    "You are a helpful AI assistant that answers in three sentences.", "Think before you answer.",
    "Be kind and polite.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids and, of the same length, the labels: the answers' tokens with their end token, else `IGNORED`."""

    tokens: list[int]
    labels: list[int]


class Corpus:
    """An endless supply of conversations from one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._padding: int = tokenizer.encode(END, add_special_tokens=False).ids[0]
        self._rng = Random(seed)
        self._pool: list[Conversation] = []  # by length

    def batch(self, num_tokens: int, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels  # [num_rows, row_length], a conversation of up to `max_length` tokens a row, padded.

        The rows are neighbours in length among `POOL_SIZE` waiting conversations, as many as fit into `num_tokens`.
        """
        self._fill_pool(max_length)
        start = self._rng.randrange(len(self._pool))
        row_length = len(self._pool[start].tokens)
        taken = slice(max(0, start + 1 - max(1, num_tokens // row_length)), start + 1)
        rows = self._pool[taken]
        del self._pool[taken]
        tokens = [row.tokens + [self._padding] * (row_length - len(row.tokens)) for row in rows]
        labels = [row.labels + [IGNORED] * (row_length - len(row.labels)) for row in rows]
        return torch.tensor(tokens), torch.tensor(labels)

    def _fill_pool(self, max_length: int) -> None:
        while len(self._pool) < POOL_SIZE:
            conversation = self._conversation()
            if len(conversation.tokens) <= max_length:
                self._pool.append(conversation)
        self._pool.sort(key=lambda conversation: len(conversation.tokens))

    def _conversation(self) -> Conversation:
        if self._rng.random() < PLAIN_SHARE:
            prompt, answer = draw_turn(self._rng)
            return self._render([(BEGIN + prompt, False), ("\n" + answer + END, True)])
        parts = [(BEGIN, False)]
        if self._rng.random() < SYSTEM_SHARE:
            parts.append((SYSTEM + self._rng.choice(SYSTEM_PROMPTS) + END, False))
        for _ in range(self._rng.choices(TURNS, TURN_WEIGHTS)[0]):
            prompt, answer = draw_turn(self._rng)
            parts += [(USER + prompt + END + ASSISTANT, False), (answer + END, True)]
        return self._render(parts)

    def _render(self, parts: list[tuple[str, bool]]) -> Conversation:
        """Parts of text, each with whether the model is to learn it."""
        encodings = self._tokenizer.encode_batch([text for text, _ in parts], add_special_tokens=False)
        tokens: list[int] = []
        labels: list[int] = []
        for encoding, (_, learnt) in zip(encodings, parts, strict=True):
            tokens += encoding.ids
            labels += encoding.ids if learnt else [IGNORED] * len(encoding.ids)
        return Conversation(tokens, labels)


def draw_turn(rng: Random) -> tuple[str, str]:
    """A prompt and its answer."""
    if rng.random() < SMALL_TALK_SHARE:
        return small_talk(rng)
    skill = rng.choices(list(SKILL_WEIGHTS), list(SKILL_WEIGHTS.values()))[0]
    example = training_example(skill, rng)
    return example.prompt, example.answer


def tokenizer_texts(num_turns: int, seed: int) -> Iterator[str]:
    """Text to train the tokenizer on: prompts and answers as the corpus has them, and the system prompts."""
    rng = Random(seed)
    yield from SYSTEM_PROMPTS
    for _ in range(num_turns):
        yield "\n".join(draw_turn(rng))
