"""Which beginnings a replica says to have cached, as its core computes and gives up blocks."""

import pytest

from gateway.replica import beginnings as beginnings_module
from gateway.replica.beginnings import CachedBeginnings
from gateway.replica.digests import BLOCK_BYTES
from gateway.replica.fleet_secret import Beginnings
from gateway.replica.state import Changes
from tests.gateway.telemetry.metrics_rig import Rig

TOKENS = 16  # of a prompt, in 4 blocks
BYTES = 4 * BLOCK_BYTES  # so that each block of tokens is one of bytes


class Replica(Rig):
    """One with memory for three prompts, which routers ask."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16)
        self.beginnings: CachedBeginnings = self.metrics.replica.beginnings
        self.event = 0
        self.known: set[str] = set()

    def serve(self, prompt: int) -> None:
        """Compute a prompt of which every block has digests and names of its own."""
        names = [bytes([prompt, block]) for block in range(TOKENS // 4)]
        timeline = self.arrive(f"{prompt}-{self.now}", prompt=TOKENS, max_tokens=1, names=names)  # type: ignore[arg-type]
        self.run()
        self.beginnings.computed(Beginnings(tuple(b"d" + name for name in names), BYTES), timeline.sequence)

    def ask(self) -> Changes:
        """Ask as a router does, and keep what it tells."""
        changes = self.beginnings.since(self.event)
        self.event = changes.next
        if changes.is_all:
            self.known.clear()
        self.known |= {*changes.cached}
        self.known -= {*changes.evicted}
        return changes

    @property
    def cached(self) -> set[str]:
        """What the cache itself has."""
        by_name = self.core.scheduler.kv_manager.cache._by_name
        return {(b"d" + name).hex() for name in by_name}  # type: ignore[operator]


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_a_router_that_asks_again_and_again_knows_what_is_cached(replica: Replica) -> None:
    assert replica.ask() == Changes(0, (), (), is_all=False)
    for prompt in (1, 2, 1, 3, 4, 5, 1, 6):
        replica.serve(prompt)
        replica.ask()
        assert replica.known == replica.cached
    assert any(digest.startswith(b"d\6".hex()) for digest in replica.known)
    assert not replica.ask().cached


def test_a_late_or_new_router_is_told_all(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings_module, "MAX_EVENTS", 4)
    replica.beginnings = CachedBeginnings(replica.core.scheduler.kv_manager.cache, 4)
    replica.serve(1)
    assert replica.ask().is_all
    for prompt in (2, 3, 4, 5):
        replica.serve(prompt)
    assert replica.ask().is_all
    assert replica.known == replica.cached
    replica.event = 10**9
    assert replica.ask().is_all, "of an earlier life"


def test_the_rest_behind_the_last_digest_is_told_while_one_prompt_has_ended_there(replica: Replica) -> None:
    digests = [b"d0", b"d1", b"d2"]  # of two blocks of tokens each

    def serve(name: str, blocks: str, num_digests: int) -> None:
        """Serve a prompt of these blocks and a number of digests."""
        timeline = replica.arrive(
            name, prompt=4 * len(blocks), max_tokens=1, names=[block.encode() for block in blocks]
        )
        replica.run()
        told = Beginnings(tuple(digests[:num_digests]), len(blocks) * BLOCK_BYTES // 2)
        replica.beginnings.computed(told, timeline.sequence)

    def behind() -> dict[str, int]:
        return dict(replica.beginnings.since(0).behind)

    serve("turn 1", "abc", 1)
    assert behind() == {b"d0".hex(): BLOCK_BYTES // 2}
    serve("turn 2, no digest longer", "abcX", 1)
    assert behind() == {b"d0".hex(): BLOCK_BYTES}, "it goes on from what was known"
    serve("turn 3", "abcXY", 2)
    assert behind() == {b"d1".hex(): BLOCK_BYTES // 2}, "that of the longer one counts"
    serve("another's, who began alike", "abcXZ", 2)
    assert behind() == {}, "which of the two goes on, nobody can tell"
    serve("and again", "abcXZ", 2)
    assert behind() == {}


def test_the_rest_behind_a_digest_is_dropped_with_its_last_block(replica: Replica) -> None:
    timeline = replica.arrive("a", prompt=12, max_tokens=1, names=[b"a", b"b", b"c"])  # type: ignore[list-item]
    replica.run()
    replica.beginnings.computed(Beginnings((b"d0",), 3 * BLOCK_BYTES // 2), timeline.sequence)
    before = replica.beginnings.since(0)
    assert before.behind == {b"d0".hex(): BLOCK_BYTES // 2}
    for prompt in range(1, 9):
        replica.serve(prompt)
        changes = replica.beginnings.since(before.next)
        if b"d0".hex() in changes.cached:
            assert not changes.behind.get(b"d0".hex()), "its last block goes first"
        if b"d0".hex() in changes.evicted:
            break
    assert b"d0".hex() in changes.evicted


def test_it_is_bounded(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings_module, "MAX_KNOWN_DIGESTS", 6)
    for prompt in (1, 2, 3):
        replica.serve(prompt)
    replica.ask()
    assert len(replica.beginnings) == len(replica.known) == 6
    assert replica.known < replica.cached
