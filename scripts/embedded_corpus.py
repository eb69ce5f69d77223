"""The embedded model's training text: conversations over its skills, packed into rows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from labs.benchmarks.skills import training_example
from labs.benchmarks.small_talk import small_talk
from labs.benchmarks.tool_skill.turns import ToolBox
from scripts.embedded_tokenizer import ASSISTANT, BEGIN, END, SYSTEM, TOOL, USER

IGNORED = -100  # the label that the loss leaves out
WINDOW_CONVERSATIONS = 64  # conversations that wait to be packed into a row
MIN_ROW_LENGTH = 512
SMALL_TALK_SHARE = 0.06
SYSTEM_SHARE = 0.25
PLAIN_SHARE = 0.08
TOOL_SHARE = 0.33
TURNS, TURN_WEIGHTS = (1, 2, 3, 4), (70, 16, 9, 5)
SKILL_WEIGHTS = {
    "count_up": 9, "count_down": 7, "count_by": 36, "days": 5, "months": 5, "alphabet": 4, "repeat": 16, "echo": 12,
    "add": 20, "story": 12,
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


class Batch(NamedTuple):
    """Rows of whole conversations  # each [num_rows, row_length]; positions start again with every conversation."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


class Corpus:
    """An endless supply of conversations from one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._padding: int = tokenizer.encode(END, add_special_tokens=False).ids[0]
        self._rng = Random(seed)
        self._waiting: list[Conversation] = []

    def batch(self, num_tokens: int, max_length: int) -> Batch:
        """About `num_tokens` tokens of whole conversations of up to `max_length`, one after the other in rows."""
        row_length = max(MIN_ROW_LENGTH, max_length)
        rows = [self._row(row_length, max_length) for _ in range(num_tokens // row_length)]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))

    def _row(self, row_length: int, max_length: int) -> tuple[list[int], list[int], list[int]]:
        """Tokens, labels and positions of the conversations that come and fit; the rest is padding."""
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        while conversation := self._take(row_length - len(tokens), max_length):
            tokens += conversation.tokens
            labels += conversation.labels
            positions += range(len(conversation.tokens))
        rest = row_length - len(tokens)
        return tokens + [self._padding] * rest, labels + [IGNORED] * rest, positions + list(range(rest))

    def _take(self, room: int, max_length: int) -> Conversation | None:
        """The longest-waiting conversation that fits into `room` tokens."""
        while len(self._waiting) < WINDOW_CONVERSATIONS:
            conversation = self._conversation()
            if len(conversation.tokens) <= max_length:
                self._waiting.append(conversation)
        fitting = (index for index, waiting in enumerate(self._waiting) if len(waiting.tokens) <= room)
        index = next(fitting, None)
        return None if index is None else self._waiting.pop(index)

    def _conversation(self) -> Conversation:
        if self._rng.random() < TOOL_SHARE:
            return self._conversation_with_tools()
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

    def _conversation_with_tools(self) -> Conversation:
        box = ToolBox(self._rng)
        system = self._rng.choice(SYSTEM_PROMPTS) + "\n" if self._rng.random() < SYSTEM_SHARE else ""
        parts = [(BEGIN + SYSTEM + system + "\n".join(tool.line() for tool in box.tools) + END, False)]
        for _ in range(self._rng.choices(TURNS, TURN_WEIGHTS)[0]):
            turn = box.turn(held_out=False)
            if turn is None:
                break
            parts += [(USER + turn.prompt + END + ASSISTANT, False), (turn.first_text + END, True)]
            if turn.calls:
                results = "".join(TOOL + result + END for result in turn.results)
                parts += [(results + ASSISTANT, False), (turn.answer + END, True)]
        return self._render(parts)

    def _render(self, parts: list[tuple[str, bool]]) -> Conversation:
        """Render parts of text, each with True if the model is to learn it."""
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
