"""Prompts and answers in the log of requests, of tenants whose policy has `log_texts`."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

from gateway.key_mask import masked
from gateway.telemetry.request_record import RequestRecord
from quotas.policy.policy import LogTexts, Policy

MAX_SEQUENCES = 4  # of one request
MAX_TOKENS = 4096  # of a prompt, its last ones; and of an answer
MAX_CHARS = 16_384  # of each
_DATE = r"\d{4}-\d\d-\d\d\b"
_LONG_NUMBER = rf"(?<!\d)(?!{_DATE})\+?\(?\d[\d ().-]{{6,}}\d"  # telephones, cards, accounts
_PERSONAL = re.compile(
    rf"(?P<email>[\w.+-]{{1,64}}@[\w-]{{1,63}}(?:\.[\w-]{{1,63}}){{1,8}})"
    rf"|(?P<iban>\b[A-Z]{{2}}\d{{2}}(?: ?[A-Z\d]{{4}}){{3,7}}(?: ?[A-Z\d]{{1,3}})?\b)"
    rf"|(?P<ip>\b(?:\d{{1,3}}\.){{3}}\d{{1,3}}\b)"
    rf"|(?P<secret>\b(?:sk|pk|ghp|gho|ghs|xox[abprs]|AKIA|eyJ)[\w.-]{{16,4096}})"
    rf"|(?P<number>{_LONG_NUMBER})"
)
MIN_DIGITS = 9  # of a number that may be a person's

Texts = list[dict[str, str]]
Decode = Callable[[Sequence[int]], str]


class LoggedTexts:
    """Finds what the log keeps of the texts of a request; `policy` gives the one in force."""

    def __init__(self, policy: Callable[[], Policy], decoders: Sequence[Decode]) -> None:
        """`decoders` turn tokens into text, one for each model of the engine."""
        self._policy, self._decoders = policy, decoders

    def of(self, record: RequestRecord) -> Callable[[], Texts] | None:
        """A maker of the texts, for a thread, which makes them once; None without the tenant's consent, or an answer
        begun.
        """
        consent = "none" if record.tenant is None else self._policy().tenant(record.tenant).log_texts
        if consent == "none" or not record.engine.timelines:
            return None
        kept = [timeline.sequence for timeline in record.engine.timelines[:MAX_SEQUENCES]]
        decoders = [self._decoders[one.request.model] for one in kept]
        tokens = [(one.request.prompt[-MAX_TOKENS:], one.output[:MAX_TOKENS]) for one in kept]
        return cache(partial(_made, decoders, tokens, consent))


def _made(decoders: list[Decode], tokens: list[tuple[list[int], list[int]]], consent: LogTexts) -> Texts:
    show = redacted if consent == "redacted" else str
    return [
        {"prompt": show(decode(prompt))[-MAX_CHARS:], "answer": show(decode(answer))[:MAX_CHARS]}
        for decode, (prompt, answer) in zip(decoders, tokens, strict=True)
    ]


def redacted(text: str) -> str:
    """The text with e-mail and IP addresses, IBANs, long numbers and keys of APIs replaced by what they are."""
    return _PERSONAL.sub(_replaced, masked(text))


def _replaced(found: re.Match[str]) -> str:
    if found.lastgroup == "number" and sum(map(str.isdigit, found[0])) < MIN_DIGITS:
        return found[0]
    return f"[{found.lastgroup}]"
