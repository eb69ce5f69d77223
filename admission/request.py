"""An HTTP request as its tenant's limits judged it, and the constants by which answers of undeclared length grow."""

from dataclasses import dataclass, replace

# An answer of undeclared length begins with as many tokens as were reserved for it, and reserves more as it goes.
EXTEND_MARGIN_TOKENS = 32  # before the end of the reserved tokens, at which more are reserved
EXTEND_STEP_TOKENS = 128  # reserved at a time
EXTEND_TIMEOUT_S = 60.0  # the longest wait of an answer for more tokens from its tenant's limit


@dataclass(slots=True)
class JudgedPrompt:
    """One prompt of an HTTP request; immutable. Lengths are in tokens; `most` is the most output tokens."""

    prompt_tokens: int
    most: int
    is_declared: bool  # by the client; else `most` is what the context and the gateway's default leave
    is_repeated: bool = False  # another answer to the previous prompt, which counts once


@dataclass(slots=True)
class JudgedRequest:
    """An HTTP request as its tenant's limits judged it, before any of its prompts came to the core; immutable. The core
    ignores it; it is recorded, so that other limits and classes can be tried on the same requests.

    Its prompts come to the core, if at all, at once and in order, as `{id}-0`, `{id}-1`, and so on.
    """

    id: str
    tenant: str
    key: str | None  # id of the API key
    service_tier: str | None
    body_bytes: int
    first_token: float | None  # seconds in which the client wants it, from its headers; None: not given
    last_token: float | None
    interval: float | None
    prompts: tuple[JudgedPrompt, ...]  # one for each answer; empty if the request was refused unread
    refusal: str | None = None  # the limit that refused it, or the failure of its check; None: admitted

    @property
    def num_answers(self) -> int:
        """Return the number of answers to each prompt: that many consecutive prompts are one."""
        return len(self.prompts) // max(1, sum([not prompt.is_repeated for prompt in self.prompts]))

    @staticmethod
    def unread(request_id: str, tenant: str, key: str | None, refusal: str) -> "JudgedRequest":
        """Return a request refused unread, because its tenant had used up a limit."""
        return JudgedRequest(request_id, tenant, key, None, 0, None, None, None, (), refusal)


class AssumedRequests:
    """Assumes that each request refused unread is like its tenant's previous read request."""

    def __init__(self) -> None:
        self._last: dict[str, JudgedRequest] = {}

    def of(self, asked: JudgedRequest) -> JudgedRequest | None:
        """Return the assumed request; None if no earlier request was read."""
        if asked.prompts:
            self._last[asked.tenant] = asked
            return asked
        like = self._last.get(asked.tenant)
        return None if like is None else replace(like, id=asked.id, key=asked.key, refusal=asked.refusal)
