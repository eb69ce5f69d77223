"""The tokenizer of a model that embeds texts or scores pairs of them."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from backend.errors import ModelLoadError


class EncoderTokenizer:
    """Turns texts, and pairs of texts, into token ids with the special tokens that the model wants."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        marks = core.encode("a").special_tokens_mask
        self._num_closing = next((n for n, mark in enumerate(reversed(marks)) if not mark), 0)

    @staticmethod
    def from_dir(directory: Path) -> "EncoderTokenizer":
        """Read tokenizer.json. Raises `ModelLoadError`."""
        path = directory / "tokenizer.json"
        try:
            return EncoderTokenizer(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error

    def cut(self, ids: list[int], most: int) -> list[int]:
        """Return the first `most` token ids of a longer input, with the special tokens that close it."""
        closing = ids[len(ids) - self._num_closing :]
        return ids[: max(0, most - len(closing))] + closing[:most]

    def encode(self, inputs: Sequence[str | tuple[str, str]]) -> list[list[int]]:
        """Return the token ids of each input. The interpreter lock is released meanwhile."""
        return [found.ids for found in self._core.encode_batch_fast(list(inputs))]
