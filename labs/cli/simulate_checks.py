"""Refuses contradictory flags of a simulation, and names columns of a trace without effect."""

from argparse import Namespace

from labs.simulation.errors import OptionError
from labs.simulation.recording import TraceFacts


def check_flags(namespace: Namespace, has_policy_file: bool) -> None:
    """Raise `OptionError` for a flag that another one overrules."""
    if namespace.classes != "trace" and namespace.service_tiers != "trace":
        raise OptionError("--service-tiers", namespace.service_tiers, "contradicts --classes, which says each class")
    if namespace.service_tiers != "trace" and not has_policy_file:
        reason = "service tiers become classes by a policy file: give one by --policy, or --classes"
        raise OptionError("--service-tiers", namespace.service_tiers, reason)
    if namespace.deadline is not None and namespace.good_first_token is not None:
        reason = "contradicts --deadline, by which a good request has its first token"
        raise OptionError("--good-first-token", namespace.good_first_token, reason)
    for field, heading in namespace.columns.items():
        if overruled := _overruled(field, namespace, has_policy_file):
            raise OptionError("--columns", f"{field}={heading}", f"has no effect: {overruled}")


def unread_columns(namespace: Namespace, facts: TraceFacts, has_policy_file: bool) -> list[str]:
    """A sentence for each column of a table without effect."""
    overruled = [
        f"no effect: column {heading} of the trace: {reason}"
        for field, heading in facts.columns
        if (reason := _overruled(field, namespace, has_policy_file))
    ]
    if facts.unread:
        overruled.append(f"not read: {', '.join(facts.unread)}; --columns says what a column is")
    return overruled


def _overruled(field: str, namespace: Namespace, has_policy_file: bool) -> str | None:
    """The reason why a field of a table has no effect; None if it has one."""
    by_rule = {
        "tenant": ("--tenants", namespace.tenants),
        "class": ("--classes", namespace.classes),
        "service_tier": ("--service-tiers", namespace.service_tiers),
    }
    option, rule = by_rule.get(field, ("", "trace"))
    if rule != "trace":
        return f"{option} {rule} says another"
    if field == "class" and namespace.service_tiers != "trace":
        return "--service-tiers says which class a request asks for"
    if field == "service_tier" and namespace.classes != "trace":
        return "--classes says the class of each request"
    if field == "service_tier" and not has_policy_file:
        return "service tiers become classes by a policy file, of which there is none"
    if field == "session" and not namespace.tenants.startswith("hash:"):
        return "sessions only say whose a request is, by --tenants hash:N"
    return None
