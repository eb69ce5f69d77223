"""Sign-in of admins at an OpenID Connect provider: who comes in, as what, and every way to pretend."""

from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.admin.admins import AdminKeys, Role
from gateway.admin.app import AdminApp
from gateway.admin.audit_log import FILE, AuditLog
from gateway.admin.endpoint import admin_route, who_asks
from gateway.settings.settings import Settings

pytest.importorskip("joserfc", reason="no joserfc here: the extra oidc")
oidc = import_module("gateway.admin.oidc")
providers = import_module("tests.gateway.admin.oidc_provider")

PAGE = "https://ops.example/sluice/"
ROLES = ("admin=platform", "operator=ops", "viewer=*")


class Site:
    """An admin port, a provider, and a browser that has its cookies."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.provider = providers.OidcProvider()
        values = {"state_dir": directory, "oidc_issuer": self.provider.issuer, "oidc_client_id": providers.CLIENT}
        values |= {"oidc_client_secret": providers.SECRET, "oidc_role": ROLES, "admin_url": PAGE}
        settings = Settings(**values | changes)
        self.asking = httpx.AsyncClient(transport=httpx.ASGITransport(self.provider.app))
        self.sign_in = oidc.SignIn(settings, AuditLog(directory / FILE), self.asking)
        keys = AdminKeys("key of the owner")
        keys.signed_in = self.sign_in.admin
        self._app = AdminApp(
            keys, [admin_route("GET", "/admin/v1/me", who_asks)], {}, self.sign_in.paths(), _no_metrics
        )
        self.browser = self.new_browser()

    def new_browser(self) -> httpx.AsyncClient:
        """A browser before a proxy that takes the page's path away."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            path = scope["path"].removeprefix("/sluice")
            await self._app(scope | {"path": path, "raw_path": path.encode()}, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=PAGE)

    async def go_to_provider(self) -> str:
        """Begin, and return the address to which the provider sends the browser back."""
        reply = await self.browser.get("oidc/login")
        assert reply.status_code == 303, reply.text
        return str((await self.asking.get(reply.headers["location"])).headers["location"])

    async def signed_in(self) -> str:
        """The address of the page after a sign-in."""
        reply = await self.browser.get(await self.go_to_provider())
        assert (reply.status_code, reply.content) == (303, b"")
        return str(reply.headers["location"])

    async def key(self) -> str | None:
        reply = await self.browser.get("oidc/session")
        key: str | None = reply.json()["key"]
        return key

    async def me(self, key: str | None) -> tuple[int, Any]:
        reply = await self.browser.get("admin/v1/me", headers={"authorization": f"Bearer {key}"})
        return reply.status_code, reply.json()


async def _no_metrics() -> bytes:
    return b""


@pytest.fixture
async def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_an_admin_signs_in_once_and_is_named_with_the_highest_role_of_the_claim(
    site: Site, tmp_path: Path
) -> None:
    site.provider.claims["groups"] = ["staff", "platform", "ops"]
    assert await site.signed_in() == PAGE
    key = await site.key()
    assert await site.me(key) == (200, {"name": "oidc:ada@example.com", "role": "admin"})
    assert await site.key() is None  # it is told once
    (line,) = (tmp_path / FILE).read_bytes().splitlines()
    entry = orjson.loads(line)
    assert entry["actor"].startswith("oidc:ada@example.com from ")
    assert (entry["action"], entry["target"]) == ("admins.sign_in", "u1 as admin")
    assert (await site.me(f"{key}"[:40] + f"{key}"[41:]))[0] == 401


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ({"groups": "ops"}, ("oidc:ada@example.com", "operator")),
        ({"groups": []}, ("oidc:ada@example.com", "viewer")),
        (
            {"email_verified": False, "preferred_username": "a\nda" * 40},
            ("oidc:" + ("a\ufffdda" * 40)[:64], "operator"),
        ),
        ({"email": None}, ("oidc:u1", "operator")),
        ({"email_verified": None}, ("oidc:u1", "operator")),
    ],
)
async def test_names_and_roles_follow_from_claims(site: Site, claims: dict[str, Any], found: tuple[str, str]) -> None:
    site.provider.claims |= claims
    await site.signed_in()
    assert await site.me(await site.key()) == (200, dict(zip(("name", "role"), found, strict=True)))


async def test_a_claim_may_lie_deeper_or_at_the_userinfo_endpoint_and_a_client_be_public(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, oidc_claim="realm_access.roles", oidc_client_secret=None, oidc_role=("operator=sre",))
    site.provider.userinfo = {"realm_access": {"roles": ["sre"]}}
    await site.signed_in()
    assert (await site.me(await site.key()))[1]["role"] == "operator"
    site.provider.userinfo["sub"] = "somebody else"
    assert await site.signed_in() == f"{PAGE}?problem=untrusted"


async def test_without_a_role_nobody_comes_in(tmp_path: Path) -> None:
    site = Site(tmp_path, oidc_role=("admin=platform",))
    assert await site.signed_in() == f"{PAGE}?problem=no_role"
    assert await site.key() is None
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "lies",
    [
        {"iss": "https://evil.example"},
        {"aud": "another client"},
        {"aud": ["sluice", "another"], "azp": "another"},
        {"nonce": "of another sign-in"},
        {"exp": 1},
        {"sub": None},
    ],
)
async def test_a_token_of_others_is_not_believed(site: Site, lies: dict[str, Any]) -> None:
    site.provider.lies = lies
    assert await site.signed_in() == f"{PAGE}?problem=untrusted"
    assert await site.key() is None


async def test_a_token_that_is_signed_with_the_public_key_as_a_secret_is_not_believed(site: Site) -> None:
    site.provider.algorithm = "HS256"
    assert await site.signed_in() == f"{PAGE}?problem=untrusted"


async def test_a_token_without_a_signature_is_not_believed(site: Site) -> None:
    site.provider.algorithm = "none"
    assert await site.signed_in() == f"{PAGE}?problem=untrusted"


async def test_a_new_key_of_the_provider_is_read_and_a_strangers_is_not(site: Site) -> None:
    rsa = import_module("joserfc.jwk").RSAKey
    await site.signed_in()
    site.provider.keys.append(rsa.generate_key(2048, {"kid": "k2"}))
    assert await site.signed_in() == PAGE
    assert site.provider.num_metadata == 2
    site.provider.keys = [rsa.generate_key(2048, {"kid": "k2"})]  # of the same name
    assert await site.signed_in() == f"{PAGE}?problem=untrusted"


async def test_a_sign_in_belongs_to_the_browser_that_began_it_and_counts_once(site: Site) -> None:
    back = await site.go_to_provider()
    stranger = site.new_browser()
    assert (await stranger.get(back)).headers["location"] == f"{PAGE}?problem=expired"
    forged = back.replace("state=", "state=x")
    assert (await site.browser.get(forged)).headers["location"] == f"{PAGE}?problem=expired"
    cookies = dict(site.browser.cookies)
    assert (await site.browser.get(back)).headers["location"] == PAGE
    site.browser.cookies.update(cookies)
    assert (await site.browser.get(back)).headers["location"] == f"{PAGE}?problem=refused"


async def test_a_cookie_of_a_sign_in_is_no_key_and_a_key_no_cookie_of_one(site: Site) -> None:
    back = await site.go_to_provider()
    (login,) = site.browser.cookies.values()
    assert (await site.me(login))[0] == 401
    await site.browser.get(back)
    key = await site.key()
    site.browser.cookies.set(oidc.LOGIN, str(key))
    assert (await site.browser.get(back)).headers["location"] == f"{PAGE}?problem=expired"


async def test_cookies_go_to_no_script_and_no_other_path(site: Site) -> None:
    reply = await site.browser.get("oidc/login")
    flags = "HttpOnly; Max-Age={}; Path=/sluice/oidc; SameSite={}; Secure".format
    assert reply.headers["set-cookie"].endswith(flags(600, "lax"))
    back = (await site.asking.get(reply.headers["location"])).headers["location"]
    cookies = (await site.browser.get(back)).headers.get_list("set-cookie")
    assert cookies[-1].endswith(flags(60, "strict"))


async def test_a_provider_that_refuses_or_is_away_is_told(site: Site) -> None:
    site.provider.error = "access_denied"
    assert await site.signed_in() == f"{PAGE}?problem=refused"
    site.provider.issuer, issuer = "https://moved.example", site.provider.issuer
    other = oidc.Provider(
        Settings(oidc_issuer=issuer, oidc_client_id="x", oidc_role=ROLES, admin_url=PAGE), site.asking
    )
    with pytest.raises(oidc.SignInFailed, match=r"is of the issuer 'https://moved\.example'"):
        await other.login_url("s", "n", "v")


async def test_a_session_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.signed_in()
    key = await site.key()
    monkeypatch.setattr(oidc, "SESSION_SECONDS", -1)
    assert (await site.me(key))[0] == 401


async def test_a_sign_in_that_cannot_be_recorded_does_not_happen(site: Site, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    assert await site.signed_in() == f"{PAGE}?problem=unavailable"
    assert await site.key() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"oidc_client_id": None}, "--oidc-issuer needs --oidc-client-id"),
        ({"admin_url": None, "oidc_role": ()}, "--oidc-issuer needs --oidc-role, --admin-url"),
        ({"oidc_role": ("root=ops",)}, "--oidc-role root=ops: must be a role"),
        ({"oidc_scope": "email"}, "must have openid among its words"),
        ({"oidc_issuer": "http://login.example"}, "oidc_issuer\n"),
        ({"admin_url": "https://ops.example/sluice"}, "admin_url\n"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    values = {"oidc_issuer": "https://login.example", "oidc_client_id": "sluice", "oidc_role": ROLES, "admin_url": PAGE}
    with pytest.raises(ValueError, match=message):
        Settings(**values | changes)


def test_the_roles_of_settings_are_those_of_admins() -> None:
    assert (*Role,) == import_module("gateway.settings.settings").ADMIN_ROLES
