"""An HTTP request as it was put to its tenant's limits, and the constants by which answers of undeclared length
grow.
"""

from dataclasses import dataclass, replace

# An answer of undeclared length begins with as many tokens as were reserved for it, and reserves more as it goes.
EXTEND_MARGIN = 32  # tokens before the end of what is reserved, at which more is asked for
EXTEND_STEP = 128  # tokens that are asked for at a time
EXTEND_TIMEOUT = 60.0  # seconds that an answer waits for its tenant's limit to have more for it


@dataclass(slots=True)
class AskedPrompt:
    """One prompt of an HTTP request, which nobody changes. Lengths are in tokens; `most` is the most that its answer
    may have.
    """

    prompt_tokens: int
    most: int
    is_declared: bool  # the client said so; else it is what the context and the gateway's default leave
    is_repeated: bool = False  # it is the prompt before it, to which another answer is wanted, and counts once


@dataclass(slots=True)
class Asked:
    """An HTTP request as its tenant's limits judged it, before any of its prompts came to the core. The core goes by
    nothing of it and nobody changes it; it is recorded, so that other limits and classes can be tried on the same
    requests.

    Its prompts come to the core, if at all, at once and in order, as `{id}-0`, `{id}-1`, and so on.
    """

    id: str
    tenant: str
    key: str | None  # id of the API key
    service_tier: str | None
    body_bytes: int
    first_token: float | None  # seconds in which the client wants it, from its headers; None: it does not say
    last_token: float | None
    interval: float | None
    prompts: tuple[AskedPrompt, ...]  # one for each answer; none of a request that was refused before it was read
    refusal: str | None = None  # the limit that refused it, or why it could not be asked; None: it was let in

    @property
    def num_answers(self) -> int:
        """Returns how many answers are wanted to each prompt: so many prompts in a row are one."""
        return len(self.prompts) // max(1, sum([not prompt.is_repeated for prompt in self.prompts]))

    @staticmethod
    def unread(request_id: str, tenant: str, key: str | None, refusal: str) -> "Asked":
        """Returns a request that was refused unread, since its tenant had nothing left of a limit."""
        return Asked(request_id, tenant, key, None, 0, None, None, None, (), refusal)


class AsIfRead:
    """Takes each request that was refused unread to be like its tenant's last one before it that was read."""

    def __init__(self) -> None:
        self._last: dict[str, Asked] = {}

    def of(self, asked: Asked) -> Asked | None:
        """Returns what the next request asked for; None where nothing is known of it, nor of any before it."""
        if asked.prompts:
            self._last[asked.tenant] = asked
            return asked
        like = self._last.get(asked.tenant)
        return None if like is None else replace(like, id=asked.id, key=asked.key, refusal=asked.refusal)
