"""The bytes of each token, for tokenizers whose decoder looks at no neighbouring tokens."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

PieceBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token ids by their bytes, filled as ids are seen. Unknown ids and skipped special tokens have no bytes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        piece_bytes: PieceBytes,
        skip_special: bool,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """`skip_special`: special tokens are skipped, except `kept`."""
        super().__init__()
        self.texts = TokenTexts(self)
        self._id_to_token = tokenizer.id_to_token
        self._piece_bytes = piece_bytes
        added = tokenizer.get_added_tokens_decoder().values() if skip_special else ()
        self._skipped = frozenset(token.content for token in added if token.special) - kept

    def __missing__(self, token_id: int) -> bytes:
        piece = self._id_to_token(token_id)
        data = b"" if piece is None or piece in self._skipped else self._piece_bytes(piece)
        self[token_id] = data
        return data


class TokenTexts(dict[int, str | None]):
    """Token ids by their text, filled as ids are seen; None where the bytes are not whole characters."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


@dataclass(frozen=True, slots=True)
class ByteDecoding:
    """A rule that turns tokens into bytes: each by itself; then `strip_left` spaces are taken off the start of the
    text.
    """

    piece_bytes: PieceBytes
    strip_left: int = 0


def byte_decoding(tokenizer: tokenizers.Tokenizer) -> ByteDecoding | None:
    """Return the rule of byte-level BPE (Llama 3, Qwen, Mistral's Tekken) or of SentencePiece BPE with byte fallback
    (Llama 2, Mistral), read from the tokenizer's decoder; None for decoders that look at neighbouring tokens.
    """
    if tokenizer.decoder is None:
        return None
    match _steps(json.loads(tokenizer.decoder.__getstate__())):
        case [{"type": "ByteLevel"}]:
            return ByteDecoding(_byte_level_bytes)
        case [{"type": "Replace", "pattern": {"String": old}, "content": new}, {"type": "ByteFallback"}, *rest]:
            strip_left = _strip_left(rest)
            return None if strip_left is None else ByteDecoding(_fallback_bytes(old, new), strip_left)
    return None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _strip_left(rest: list[dict[str, Any]]) -> int | None:
    """Return the number of spaces that the steps after ByteFallback strip off the text; None if they do anything
    else.
    """
    match rest:
        case [{"type": "Fuse"}] | []:
            return 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return start
    return None


def _fallback_bytes(old: str, new: str) -> PieceBytes:
    def piece_bytes(piece: str) -> bytes:
        piece = piece.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    return piece_bytes


def _byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a piece. A piece with characters outside the alphabet (an added token) stands for its
    UTF-8.
    """
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
