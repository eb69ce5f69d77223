"""What of a policy the scheduling core goes by."""

from admission.queue_bounds import QueueBounds
from admission.terms import Terms
from quotas import policy as quotas_policy
from quotas.limit import Resource
from quotas.policy import Policy, TenantPolicy


def terms_of(policy: Policy) -> Terms:
    """What of a policy the core goes by."""
    tenants = (policy.default, *policy.tenants.values())
    waiting = {tenant.name: most for tenant in tenants if (most := _may_queue(tenant)) is not None}
    return Terms(
        weights={tenant.name: tenant.weight for tenant in tenants},
        offsets=tuple(level.aging for level in policy.classes),
        bounds=tuple(_bounds(level.queue) for level in policy.classes),
        may_wait=waiting,
    )


def _may_queue(tenant: TenantPolicy) -> int | None:
    amounts = [limit.amount for limit in tenant.limits if limit.resource is Resource.QUEUED_REQUESTS]
    return min(amounts, default=None)


def _bounds(queue: quotas_policy.QueueBounds) -> QueueBounds:
    return QueueBounds(queue.requests, queue.tokens, queue.bytes, queue.seconds)
