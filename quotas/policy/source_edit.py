"""Edits of policy files as text, so that comments, order and form stay as their admins wrote them. Pure."""

from collections.abc import Mapping
from difflib import unified_diff
from typing import NamedTuple

from quotas.policy.tenant_texts import cut, name_and_body


class Passage(NamedTuple):
    """Bytes [start, end) of a policy file."""

    file: str
    start: int
    end: int

    def of(self, sources: Mapping[str, bytes]) -> bytes:
        return sources[self.file][self.start : self.end]

    def replaced(self, sources: Mapping[str, bytes], text: bytes) -> dict[str, bytes]:
        """The files with `text` in place of the passage. A line that follows it begins a line."""
        content = sources[self.file]
        before, after = content[: self.start], content[self.end :]
        if before and not before.endswith(b"\n"):
            before += b"\n"
        if text and not text.endswith(b"\n"):
            text += b"\n"
        return {**sources, self.file: before + text + after}


def passage_of_tenant(sources: Mapping[str, bytes], tenant: str) -> Passage | None:
    """The lines of a tenant, or the empty passage behind the last tenant if none of the files has it; None if the
    tenants cannot be told apart by lines: in flow style, or without any tenant.
    """
    end = None
    for file, content in sources.items():
        parts = cut(file, content)
        if parts is None:
            continue
        _, texts = parts
        at = _start_of_line(content, texts.first_line)
        for text in texts.texts:
            named = name_and_body(text)
            if named is not None and named[0] == tenant:
                return Passage(file, at, at + len(text))
            at += len(text)
        end = Passage(file, at, at)
    return end


def _start_of_line(content: bytes, line: int) -> int:
    """The place of a line, which counts from 1."""
    at = 0
    for _ in range(line - 1):
        at = content.index(b"\n", at) + 1
    return at


def patch(file: str, before: bytes, after: bytes) -> str:
    """The edit of a file as `patch -p0` and `git apply -p0` take it."""
    old, new = (content.decode().splitlines(keepends=True) for content in (before, after))
    lines = unified_diff(old, new, file, file)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
