"""Tenants on the admin port: live requests, use, and the rest of their limits."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest

from backend.scheduler.kv_accounts import KVAccounts
from gateway.admin.history import History, Totals
from gateway.admin.live_requests import LiveRequests
from gateway.admin.rows import MAX_ROWS, Row, is_waiting
from gateway.api.service import Service
from gateway.background import map_in_slices
from gateway.errors import TenantNotFound
from gateway.quoting import quoted
from quotas.errors import QuotaError
from quotas.policy.limit import Limit, Resource
from quotas.policy.policy import TenantPolicy
from quotas.reservation import LimitState

MAX_REQUEST_ROWS = 50


class Tenants:
    """Lists the tenants of the policy, of keys and of requests."""

    def __init__(self, service: Service, history: History, requests: LiveRequests) -> None:
        self._service = service
        self._history = history
        self._requests = requests

    async def listed(self, words: str = "") -> Row:
        """List the tenants whose names contain `words`, by service in the last minute, descending."""
        service, shares = self._service, self._history.shares.recent()
        others = [*service.keys.tenants(), *self._history.totals]
        found = await asyncio.to_thread(_found, words.lower(), service.policies.current.tenants, others, shares)
        shown = found[:MAX_ROWS]
        counts = _TenantCounts(service, self._history, self._requests, shown)
        rows = await map_in_slices(shown, lambda name: self._row(name, counts))
        return {"tenants": rows, "truncated": len(found) - len(shown)}

    async def shown(self, name: str) -> Row:
        """Return one tenant with its limits, keys and requests. Raises `TenantNotFound`."""
        service = self._service
        if not (
            name in service.policies.current.tenants or name in service.keys.tenants() or name in self._history.totals
        ):
            raise TenantNotFound(f"No tenant {quoted(name, 100)} is in the policy, has a key, or has sent a request.")
        policy = service.policies.current.tenant(name)
        counts = _TenantCounts(service, self._history, self._requests, [name])
        return self._row(name, counts) | {
            "class": policy.default_class,
            "team": policy.team,
            "limits": await self._limits(name, policy, counts),
            "keys": [{"id": key.key_id, "scopes": key.scopes} for key in service.keys.of_tenant(name)],
            "live": self._requests.live_of_tenant(name, MAX_REQUEST_ROWS),
            "recent": self._requests.of_tenant(name, MAX_REQUEST_ROWS),
        }

    def _row(self, name: str, counts: "_TenantCounts") -> Row:
        service, history = self._service, self._history
        totals = history.totals.get(name, Totals())
        scheduler, block_bytes = service.core.scheduler, service.kv_shape.block_bytes
        blocks = counts.kv_held[name]
        return {
            "name": name,
            "weight": service.policies.current.tenant(name).weight,
            "running": counts.running[name],
            "waiting": counts.waiting[name],
            "kv_blocks": blocks,
            "kv_bytes": blocks * block_bytes,
            "kv_charged_bytes": counts.kv_charged[name] * block_bytes,
            "kv_cached_bytes": counts.kv_cached[name] * block_bytes,
            "kv_kept_bytes": counts.kv_kept[name] * block_bytes,
            "kv_pinned_bytes": counts.kv_pinned[name] * block_bytes,
            "pinned_blocks": counts.pinned[name],
            "pinned_reuses": scheduler.kv_manager.blocks.pinned_prefixes.reuses[name],
            "kv_swapped_bytes": counts.kv_swapped[name] * block_bytes,
            "kv_wasted_bytes": counts.unused_slots[name] * block_bytes // scheduler.config.block_size,
            "service_seconds": history.shares.total.get(name, 0.0),
            "share": history.shares.share(name),
            "credit_seconds": service.core.credit(name) if name in history.shares.total else 0.0,
            "requests": totals.requests,
            "refused": totals.refused,
            "prompt_tokens": counts.prompt_tokens[name],
            "output_tokens": counts.output_tokens[name],
        }

    async def _limits(self, name: str, policy: TenantPolicy, counts: "_TenantCounts") -> list[Row]:
        """The limits of the tenant and its team with the rest of each; limits of its keys are shown with the policy."""
        limits = policy.limits_of()
        charged = tuple(limit for limit in limits if limit.is_charged)
        try:
            states = await self._service.quotas.store.states(name, None, charged) if charged else ()
        except QuotaError:  # the store does not answer
            states = ()
        known = {state.limit: state for state in states}
        held = {
            Resource.KV_BYTES: self._service.core.scheduler.kv_manager.allowances.held[name]
            * self._service.kv_shape.block_bytes,
            Resource.QUEUED_REQUESTS: counts.waiting[name],
        }
        return [self._limit(limit, known.get(limit), held.get(limit.resource)) for limit in limits]

    def _limit(self, limit: Limit, state: LimitState | None, held: int | None) -> Row:
        """Describe a limit; `held` is this process's part, for limits outside the store."""
        left = state.remaining if state is not None else None if held is None else max(0, limit.amount - held)
        return {
            "name": limit.name,
            "resource": limit.resource,
            "window": limit.window.unit if limit.window else None,
            "amount": limit.number(limit.amount),
            "capacity": limit.number(limit.capacity),
            "currency": limit.currency,
            "left": None if left is None else limit.number(left),
            "resets_in": state.reset if state is not None and limit.window else None,
        }


def _found(words: str, named: Iterable[str], others: Iterable[str], shares: Mapping[str, float]) -> list[str]:
    """All names that contain `words`, the first `MAX_ROWS` of them in order."""
    found = [name for name in {*named, *others} if words in name.lower()]
    served = sorted((name for name in found if name in shares), key=lambda name: (-shares[name], name))[:MAX_ROWS]
    first = dict.fromkeys([*served, *nsmallest(MAX_ROWS, (name for name in found if name not in shares))])
    return [*first, *(name for name in found if name not in first)]


class _TenantCounts:
    """Counts by tenant at one moment: sequences being served, tokens of those and of all that ended, and KV blocks."""

    def __init__(self, service: Service, history: History, requests: LiveRequests, names: Iterable[str]) -> None:
        self.running = Counter(s.tenant for s in service.core.scheduler.running.values())
        self.waiting: Counter[str] = Counter()
        ended = {name: totals for name in names if (totals := history.totals.get(name))}
        self.prompt_tokens = Counter({name: totals.prompt_tokens for name, totals in ended.items()})
        self.output_tokens = Counter({name: totals.output_tokens for name, totals in ended.items()})
        kv = KVAccounts(service.core.scheduler.kv_manager)
        self.kv_held, self.kv_charged, self.kv_cached = kv.held(), kv.charged(), kv.cache.idle_by_tenant()
        self.kv_kept, self.kv_pinned = kv.cache.kept_by_tenant(), kv.pinned()
        self.pinned = service.core.scheduler.kv_manager.blocks.pinned_prefixes.pinned_by_tenant()
        self.kv_swapped, self.unused_slots = kv.host.held, kv.unused_slots()
        for record in requests.records():
            for timeline in record.engine.timelines:
                sequence = timeline.sequence
                self.waiting[sequence.tenant] += is_waiting(sequence)
                self.prompt_tokens[sequence.tenant] += sequence.num_prompt_tokens
                self.output_tokens[sequence.tenant] += len(sequence.output)
