"""Sign-in of admins at a provider, where the settings name one; `gateway.admin.oidc` needs an extra."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import httpx

from gateway.admin.admins import AdminKeys
from gateway.admin.audit_log import AuditLog
from gateway.admin.endpoint import Blob
from gateway.settings.settings import Settings


@asynccontextmanager
async def sign_in(
    settings: Settings, keys: AdminKeys, audit: AuditLog
) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
    """The paths of the port by which admins sign in at a provider, if the settings name one."""
    if settings.oidc_issuer is None:
        yield {"/oidc/session": Blob(b'{"offered": false}', "application/json")}
        return
    oidc = import_module("gateway.admin.oidc")  # needs an extra
    async with httpx.AsyncClient(timeout=oidc.ANSWER_SECONDS) as client:
        offered = oidc.SignIn(settings, audit, client)
        keys.signed_in = offered.admin
        yield offered.paths()
