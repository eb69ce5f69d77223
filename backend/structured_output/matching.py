"""Matchers of the slots of a running batch: each consumes its slot's tokens, and tells which may come next."""

from collections.abc import Iterable

from llguidance import LLMatcher

from backend.structured_output.frames import RowStatus


class SlotMatcher:
    """The matcher of one sequence's output.

    Where the grammar leaves one continuation, its tokens are `forced`. They are computed once; then the mask of each of
    their places has one bit, until another token is consumed. Masks depend on the output alone: the same tokens
    consumed again give the same masks.

    A forced token is one that the library allows too, and never ends the answer.
    """

    def __init__(self, compiled: LLMatcher, end_tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.forced: list[int] = []
        self._end_tokens = frozenset(end_tokens)
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._looked_at = -1  # the number of consumed tokens behind which `forced` was last computed
        self._has_ended = False

    def output_is(self, start: int, tokens: Iterable[int]) -> None:
        """Consume these tokens from place `start` of the output on; the matcher begins anew if the output was another
        before.

        A negative token means that the step before had none to draw, and its answer is about to end. A step that was
        launched meanwhile asks for its row all the same, and is told that nothing may follow.
        """
        known = self.tokens
        if start < len(known):
            tokens = list(tokens)
            if known[start : start + len(tokens)] == tokens and len(known) == start + len(tokens):
                return
            tokens = [*known[:start], *tokens]
            self.tokens, self.forced, self._looked_at, self._has_ended = [], [], -1, False
            self._matcher = self._compiled.deep_copy()
        assert start <= len(known), "tokens were left out"
        for token in tokens:
            self._has_ended = self._has_ended or token < 0
            if not self._has_ended:
                self._consume(token)
            self.tokens.append(token)

    def fill(self, address: int, num_bytes: int) -> RowStatus:
        """Write the mask of the next token to memory, bit t % 32 of word t // 32 for token t. Without a mask the memory
        stays unchanged.
        """
        if self._has_ended:
            self.forced = []
            return RowStatus.NOTHING
        self._force()
        matcher = self._matcher
        if not self.forced and not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if not matcher.is_error():
            return RowStatus.MASKED
        return RowStatus.EXHAUSTED if matcher.stop_reason().endswith("TooComplex") else RowStatus.NOTHING

    def may_end_with(self, token: int) -> bool:
        """Return True if the output matches as it is, or with this token behind it: some grammars name a token that
        ends them.
        """
        if self._matcher.is_accepting():
            return True
        ended = self._matcher.deep_copy()
        return ended.consume_token(token) and ended.is_accepting()

    def _consume(self, token: int) -> None:
        self._force()
        if self.forced:
            self.forced = self.forced[1:] if self.forced[0] == token else []
        self._matcher.consume_token(token)

    def _force(self) -> None:
        if not self.forced and self._looked_at != len(self.tokens) and not self._matcher.is_error():
            self._looked_at = len(self.tokens)
            forced = self._matcher.compute_ff_tokens()
            if forced:
                del forced[self._matcher.validate_tokens(forced) :]
                if not self._end_tokens.isdisjoint(forced):
                    del forced[next(place for place, token in enumerate(forced) if token in self._end_tokens) :]
            self.forced = forced
