"""Settles requests whose replica was lost, for the router that carried their answers."""

from pydantic import Field

from gateway.admin.endpoint import Json
from gateway.errors import QuotaUnverifiable
from gateway.http.json_body import Wire
from quotas.errors import QuotaError
from quotas.reservation import Delivered
from quotas.store.redis_store import RedisStore


class CutRequest(Wire):
    """One request as its router knows it: see `Delivered`."""

    tenant: str = Field(min_length=1)
    request: str = Field(pattern=r"^[0-9a-f]{32}$")
    has_begun: bool
    output_tokens: int | None = Field(default=None, ge=0, le=2**40)


async def settle_cut(store: RedisStore, cut: CutRequest) -> Json:
    """Settle the request; reports whether it was still open. Raises `QuotaUnverifiable` if the store is away."""
    try:
        settled = await store.conclude(cut.tenant, Delivered(cut.request, cut.has_begun, cut.output_tokens))
    except QuotaError as error:
        raise QuotaUnverifiable(f"The quota store did not settle the request: {error}.") from None
    return {"settled": settled}
