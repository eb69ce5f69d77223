"""Parts of an event log's lines, put together by hand: the encoder takes twice as long."""

from json.encoder import encode_basestring_ascii

from admission.request import AskedPrompt
from backend.scheduler.sequence import Sequence


def text_of(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)


def prompt_of(prompt: AskedPrompt) -> str:
    declared, repeated = "true" if prompt.is_declared else "false", ",true" if prompt.is_repeated else ""
    return f"[{prompt.prompt_tokens},{prompt.most},{declared}{repeated}]"


def number_of(number: float | None) -> str:
    return "null" if number is None else repr(number)


def ids_of(sequences: list[Sequence]) -> str:
    return f"[{','.join([encode_basestring_ascii(sequence.id) for sequence in sequences])}]" if sequences else "[]"
