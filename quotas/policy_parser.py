"""From trees of text to a policy. All that is wrong is noted, and something sensible read in its place."""

from collections.abc import Mapping

from quotas import words
from quotas.class_fields import read_classes
from quotas.default_policy import DEFAULTS
from quotas.policy import Policy, TenantPolicy, Unnamed
from quotas.policy_schema import fields_of
from quotas.problems import Mark, Problems
from quotas.section import Section
from quotas.tenant_fields import TenantReader
from quotas.yaml_nodes import Fields, Node


def parse(trees: Mapping[str, Node], problems: Problems, is_whole: bool) -> Policy:
    """The policy that these files, by name, are together. `is_whole`: no file is missing from them, so that a name
    which is defined nowhere is a mistake.
    """
    tops = [Section(tree, "", problems) for tree in trees.values() if isinstance(tree, Fields)]
    for top in tops:
        top.refuse_strangers(fields_of(""))
    classes = read_classes(_only(tops, "classes"))
    tenants = TenantReader(classes, is_whole)
    default = tenants.read(_only(tops, "defaults"), "", DEFAULTS)
    found: dict[str, tuple[Mark, TenantPolicy]] = {}
    for top in tops:
        section = top.section("tenants")
        for name, mark, fields in section.sections(words.tenant_name) if section else ():
            if name in found:
                top.note(mark, fields.path, f"is a second time here, after {found[name][0]}")
            else:
                found[name] = mark, tenants.read(fields, name, default)
    having = _holder(tops, "unnamed_tenants")
    allow: Unnamed = "allow"
    unnamed = having.value("unnamed_tenants", words.unnamed, allow) if having else allow
    return Policy.of(classes, default, {name: tenant for name, (_, tenant) in found.items()}, unnamed)


def _only(tops: list[Section], name: str) -> Section | None:
    """The one section of this name among the files."""
    holder = _holder(tops, name)
    return holder.section(name) if holder else None


def _holder(tops: list[Section], name: str) -> Section | None:
    """The one file that has this field."""
    having = [top for top in tops if name in top]
    for other in having[1:]:
        other.wrong(name, f"is in {having[0].mark.file} already: one file of a policy has it")
    return having[0] if having else None
