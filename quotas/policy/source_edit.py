"""Edits of policy files as text, so that comments, order and form stay as their admins wrote them. Pure."""

import re
from collections.abc import Mapping
from difflib import unified_diff
from typing import NamedTuple

from quotas.policy.problems import Problems, TooManyProblems
from quotas.policy.schema import TENANT_NAME
from quotas.policy.tenant_texts import TenantTexts, cut
from quotas.policy.yaml_nodes import Fields, Unreadable, compose

_NAMED = re.compile(rb""" +(['"]?)(%s)\1[ \t]*:(?=\s)""" % TENANT_NAME.encode())
_INDENT = re.compile(rb"^([ \t]*)[^\s#]", re.MULTILINE)


class Passage(NamedTuple):
    """Bytes [start, end) of a policy file."""

    file: str
    start: int
    end: int

    def of(self, sources: Mapping[str, bytes]) -> bytes:
        return sources[self.file][self.start : self.end]

    def replaced(self, sources: Mapping[str, bytes], text: bytes) -> dict[str, bytes]:
        """The files with `text` in place of the passage. A line that follows it begins a line; lines end as those of
        the file do.
        """
        content = sources[self.file]
        before, after = content[: self.start], content[self.end :]
        line_end = b"\r\n" if 0 < content.count(b"\n") == content.count(b"\r\n") else b"\n"
        if before and not before.endswith(b"\n"):
            before += line_end
        if text and not text.endswith(b"\n"):
            text += b"\n"
        if line_end != b"\n":
            text = text.replace(b"\r\n", b"\n").replace(b"\n", line_end)
        return {**sources, self.file: before + text + after}

    def is_whole(self, sources: Mapping[str, bytes]) -> bool:
        """True if it has whole lines, and no line behind it is part of its last entry by its indentation."""
        content, text = sources[self.file], self.of(sources)
        begins_line = (
            self.start == 0 or b"\n" in (content[self.start - 1 : self.start], text[:1]) or text[:2] == b"\r\n"
        )
        own, following = _INDENT.search(text), _INDENT.search(content, self.end)
        return begins_line and (own is None or following is None or len(following[1]) <= len(own[1]))


def passage_of_tenant(sources: Mapping[str, bytes], tenant: str) -> Passage | None:
    """The lines of a tenant, or the empty passage behind the last tenant if none of the files has it; None if the
    tenants cannot be told apart by lines: in flow style, or without any tenant.
    """
    end = None
    for file, content in sources.items():
        texts = _tenant_texts(file, content)
        if texts is None:
            continue
        at = _start_of_line(content, texts.first_line)
        for text in texts.texts:
            named = _NAMED.match(text)
            if named is not None and named[2].decode() == tenant:
                return Passage(file, at, at + len(text))
            at += len(text)
        end = Passage(file, at, at)
    return end


def _tenant_texts(file: str, content: bytes) -> TenantTexts | None:
    """The texts of the tenants, if the lines that look like them are the file's tenants, and no part of a prompt."""
    parts = cut(file, content)
    if parts is None:
        return None
    rest, texts = parts
    try:
        tree = compose(file, rest, Problems())
    except (Unreadable, TooManyProblems):
        return None
    return texts if isinstance(tree, Fields) and texts.are_tenants_of(tree) else None


def _start_of_line(content: bytes, line: int) -> int:
    """The place of a line, which counts from 1."""
    at = 0
    for _ in range(line - 1):
        at = content.index(b"\n", at) + 1
    return at


def patch(file: str, before: bytes, after: bytes) -> str:
    """The edit of a file as `patch -p0` and `git apply -p0` take it."""
    old, new = (content.decode(errors="replace").splitlines(keepends=True) for content in (before, after))
    lines = unified_diff(old, new, file, file)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
