"""Names KV blocks by their content: a chain of hashes over tokens, from a root that identifies the sharing scope.

The digest of a block is BLAKE2b (RFC 7693) of 16 bytes, over the digest of the block before it and its own token ids.
The root is keyed with a secret of the deployment, over everything else that keys and values depend on, so that an
attacker cannot search for two prompts of one name; and over the salt of the tenant or group, so that a tenant finds its
own blocks alone (CVE-2025-46570: the time to a first token told which prefixes other users had cached).
"""

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from typing import Protocol
from weakref import ref

DIGEST_BYTES = 16


class BlockName:
    """The content of one full block and of all blocks before it. Equal contents have one and the same name.

    Only logs use `ordinal`, to tell names apart.
    """

    __slots__ = ("__weakref__", "ordinal", "windows")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.windows: tuple[ref[WindowName], ...] = ()  # of its block in each group of layers with a window, once used

    def __repr__(self) -> str:
        return f"BlockName({self.ordinal})"


class WindowName(BlockName):
    """The name of the block of a group of layers with a window, beside a block of the text. It keeps that block's name
    in use: else it would depend on other keepers of that, as of finished sequences, whether this block is found.
    """

    __slots__ = ("beside",)

    def __init__(self, beside: BlockName) -> None:
        super().__init__(beside.ordinal)
        self.beside = beside


class HashedName(BlockName):
    """A name with its digest, from which the next block's digest follows. It is known while it is in use.

    A `WeakValueDictionary` would do the same, and take as long again as hashing the block.
    """

    __slots__ = ("_known", "digest")

    def __init__(self, ordinal: int, digest: bytes, known: "dict[bytes, ref[HashedName]]") -> None:
        self.ordinal = ordinal  # without a call of the base class, because one is made for each block
        self.windows = ()
        self.digest = digest
        self._known = known
        known[digest] = ref(self)

    def __del__(self) -> None:
        del self._known[self.digest]


def adapter_salt(digest: str | None) -> tuple[str, ...]:
    """Return the parts of a root's salt by which an adapter's keys and values are kept apart; none without one."""
    return () if digest is None else ("adapter", digest)


class Tokens(Protocol):
    """The tokens whose blocks are named: a sequence's, or a prefix's."""

    cache_root: bytes
    block_names: list[BlockName]

    @property
    def num_prompt_tokens(self) -> int: ...

    def tokens_at(self, start: int, length: int) -> list[int]: ...


class BlockNames:
    """Gives each content one name for as long as a cached block or a sequence uses it."""

    def __init__(
        self, secret: bytes, block_size: int, context: Iterable[str] = (), beside: "BlockNames | None" = None
    ) -> None:
        """`secret` has at most 64 bytes. `context` is what keys and values depend on beside tokens: the model and its
        revision, their type. `beside`: the names of another model in the same cache.
        """
        self._secret = secret
        self._block_size = block_size
        self._context = tuple(context)
        self._known: dict[bytes, ref[HashedName]] = {} if beside is None else beside._known
        self._ordinals: Iterator[int] = count(1) if beside is None else beside._ordinals

    def root(self, *salt: str) -> bytes:
        digest = blake2b(digest_size=DIGEST_BYTES, key=self._secret)
        for part in (*self._context, *salt):
            said = part.encode("utf-8", "surrogatepass")
            digest.update(len(said).to_bytes(8, "little") + said)
        return digest.digest()

    def name(self, sequence: Tokens, num_blocks: int) -> None:
        """Name the sequence's first blocks, whose tokens are all known; a named block keeps its name.

        O(newly named blocks), some 3 µs each: a long prompt is to be named in parts.
        """
        names, size = sequence.block_names, self._block_size
        if not sequence.cache_root or len(names) >= num_blocks:
            return
        first = len(names)
        tokens = array("i", sequence.tokens_at(first * size, (num_blocks - first) * size)).tobytes()
        known, step = self._known, size * 4
        parent = names[-1].digest if first else sequence.cache_root  # type: ignore[attr-defined]
        for begin in range(0, len(tokens), step):
            parent = blake2b(parent + tokens[begin : begin + step], digest_size=DIGEST_BYTES).digest()
            found = known.get(parent)
            name = None if found is None else found()
            names.append(HashedName(next(self._ordinals), parent, known) if name is None else name)
