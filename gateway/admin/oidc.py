"""Admins who sign in at an OpenID Connect provider: authorization code with PKCE (RFC 7636), and ID tokens.

A browser goes to `/oidc/login`, to the provider, and back to `/oidc/callback`; a sealed cookie binds the two. The page
then fetches its key from `/oidc/session`, once: a sealed name and role, which this process alone opens, for
`SESSION_SECONDS`.
"""

import asyncio
import logging
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import quote, urlencode, urljoin, urlsplit

import httpx
import orjson
from cryptography.fernet import Fernet, InvalidToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from gateway.admin.admins import MAX_NAME_CHARS, Admin, Role
from gateway.admin.audit_log import AuditLog
from gateway.admin.endpoint import actor_of
from gateway.errors import AuditUnavailable
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)

ALGORITHMS = [f"{family}{bits}" for family in ("RS", "PS", "ES") for bits in (256, 384, 512)]
ANSWER_SECONDS = 5.0  # of the provider
METADATA_SECONDS = 3600.0  # for which its addresses and keys are kept
MAX_EXCHANGES = 4  # at once
LOGIN_SECONDS = 600  # from the page to the provider and back
HANDOVER_SECONDS = 60  # until the page has fetched its key
SESSION_SECONDS = 8 * 3600
LEEWAY_SECONDS = 60  # of the provider's clock
PREFIX = "oidc:"  # of names in the audit log
ANYBODY = "*"
LOGIN, HANDOVER = "sluice-oidc-login", "sluice-oidc-key"  # cookies


Answer = Callable[[Request], Awaitable[Response]]


class SignInFailed(Exception):
    """A sign-in came to nothing; the message is for operators, `problem` is the page's word for it."""

    def __init__(self, problem: str, message: str) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Metadata:
    """A provider's metadata (OpenID Connect Discovery 1.0), and its keys."""

    authorization: str
    token: str
    userinfo: str | None
    auth_methods: Sequence[str]  # of the token endpoint
    keys: KeySet
    read: float  # in seconds of the monotonic clock


class Provider:
    """A provider as it describes itself; this gateway is one of its clients."""

    def __init__(self, settings: Settings, client: httpx.AsyncClient) -> None:
        assert settings.oidc_issuer is not None
        self._issuer, self._client_id, self._client = settings.oidc_issuer, settings.oidc_client_id or "", client
        secret = settings.oidc_client_secret
        self._secret = None if secret is None else secret.get_secret_value()
        self._scope = settings.oidc_scope
        self._redirect = urljoin(settings.admin_url or "", "oidc/callback")
        self._metadata: Metadata | None = None
        self._exchanging = asyncio.Semaphore(MAX_EXCHANGES)

    async def login_url(self, state: str, nonce: str, verifier: str) -> str:
        """The address to send the browser to. Raises `SignInFailed`."""
        challenge = urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        fields = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._redirect,
            "scope": self._scope,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        address = (await self._described()).authorization
        return f"{address}{'&' if '?' in address else '?'}{urlencode(fields)}"

    async def claims(self, code: str, nonce: str, verifier: str, wanted: str) -> dict[str, Any]:
        """Exchange a code for the claims of its user; those of the userinfo endpoint too, unless the ID token has the
        claim that is wanted. Raises `SignInFailed`.
        """
        async with self._exchanging:
            metadata = await self._described()
            given = await self._exchanged(metadata, code, verifier)
            claims = await self._checked(metadata, str(given.get("id_token")), nonce)
            if claim(claims, wanted) is not None or metadata.userinfo is None or "access_token" not in given:
                return claims
            headers = {"authorization": f"Bearer {given['access_token']}"}
            more = await self._asked("GET", metadata.userinfo, headers=headers)
            if more.get("sub") != claims["sub"]:
                raise SignInFailed("untrusted", "the userinfo endpoint told of another user")
            return more | claims

    async def _exchanged(self, metadata: Metadata, code: str, verifier: str) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect,
            "code_verifier": verifier,
        }
        if self._secret is None:
            return await self._asked("POST", metadata.token, data=form | {"client_id": self._client_id})
        if "client_secret_basic" not in metadata.auth_methods:
            form |= {"client_id": self._client_id, "client_secret": self._secret}
            return await self._asked("POST", metadata.token, data=form)
        pair = quote(self._client_id, ""), quote(self._secret, "")  # RFC 6749, 2.3.1
        return await self._asked("POST", metadata.token, data=form, auth=pair)

    async def _checked(self, metadata: Metadata, id_token: str, nonce: str) -> dict[str, Any]:
        """The claims of an ID token (OpenID Connect Core 1.0, 3.1.3.7)."""
        rules = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_SECONDS,
            iss={"essential": True, "value": self._issuer},
            aud={"essential": True, "value": self._client_id},
            nonce={"essential": True, "value": nonce},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            try:
                token = jwt.decode(id_token, metadata.keys, algorithms=ALGORITHMS)
            except InvalidKeyIdError:  # of a key that is newer than what was read
                token = jwt.decode(id_token, (await self._described(anew=True)).keys, algorithms=ALGORITHMS)
            rules.validate(token.claims)
            if token.claims.get("azp", self._client_id) != self._client_id:
                raise SignInFailed("untrusted", "the ID token is of another client")
        except (JoseError, ValueError, TypeError) as error:
            raise SignInFailed("untrusted", f"the ID token is not valid: {error!r:.200}") from None
        return dict(token.claims)

    async def _described(self, anew: bool = False) -> Metadata:
        now = time.monotonic()
        if self._metadata is None or anew or now - self._metadata.read > METADATA_SECONDS:
            address = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
            told = await self._asked("GET", address)
            if told.get("issuer") != self._issuer:
                raise SignInFailed("unavailable", f"{address} is of the issuer {told.get('issuer')!r:.200}")
            try:
                self._metadata = Metadata(
                    str(told["authorization_endpoint"]),
                    str(told["token_endpoint"]),
                    told.get("userinfo_endpoint"),
                    told.get("token_endpoint_auth_methods_supported", ["client_secret_basic"]),
                    KeySet.import_key_set(await self._asked("GET", str(told["jwks_uri"]))),
                    now,
                )
            except (KeyError, JoseError, ValueError, TypeError) as error:
                raise SignInFailed("unavailable", f"{address} cannot be used: {error!r:.200}") from None
        return self._metadata

    async def _asked(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        try:
            reply = await self._client.request(method, url, **options)
            told = orjson.loads(reply.content)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise SignInFailed("unavailable", f"{url:.200} gave no answer in JSON: {error!r:.200}") from None
        if not reply.is_success or not isinstance(told, dict):
            raise SignInFailed("refused", f"{url:.200} answered {reply.status_code}: {reply.text:.200}")
        return told


def claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or by a path such as `realm_access.roles`; None if it is not there."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def role_of(value: Any, roles: Mapping[str, Role]) -> Role | None:
    """The highest role that the values of a claim bring; None: none of them brings any."""
    given = value if isinstance(value, list) else [value]
    found = [role for word, role in roles.items() if word == ANYBODY or word in given]
    return max(found, key=[*Role].index, default=None)


def name_of(claims: Mapping[str, Any]) -> str:
    """The name of a user in the audit log, which has the unique `sub` of each sign-in too."""
    email = claims.get("email") if claims.get("email_verified") is True else None
    name = str(email or claims.get("preferred_username") or claims["sub"])
    return PREFIX + "".join(one if one.isprintable() else "\ufffd" for one in name)[:MAX_NAME_CHARS]


class SignIn:
    """The paths by which a browser signs in, and the keys that it gets."""

    def __init__(self, settings: Settings, audit: AuditLog, client: httpx.AsyncClient) -> None:
        self._provider = Provider(settings, client)
        self._claim = settings.oidc_claim
        pairs = (given.partition("=") for given in settings.oidc_role)
        self._roles = {value: Role(role) for role, _, value in pairs}
        self._page, self._audit = settings.admin_url or "", audit
        self._is_secure = self._page.startswith("https:")
        self._path = urlsplit(self._page).path + "oidc"
        self._seal = Fernet(Fernet.generate_key())

    def paths(self) -> Mapping[str, Answer]:
        """The endpoints by path, which need no key."""
        return {"/oidc/login": self.login, "/oidc/callback": self.callback, "/oidc/session": self.session}

    def admin(self, key: bytes) -> Admin | None:
        """The admin whose key this is; None if it is not one of ours, or too old."""
        try:
            kind, name, role = orjson.loads(self._seal.decrypt(key, SESSION_SECONDS))
        except (InvalidToken, ValueError):
            return None
        return Admin(name, Role(role), b"") if kind == HANDOVER else None

    async def login(self, request: Request) -> Response:
        """Send the browser to the provider."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        try:
            answer = RedirectResponse(await self._provider.login_url(state, nonce, verifier), 303)
        except SignInFailed as error:
            return self._failed(error)
        self._set_cookie(answer, LOGIN, self._sealed(LOGIN, state, nonce, verifier), LOGIN_SECONDS, "lax")
        return answer

    async def callback(self, request: Request) -> Response:
        """Take the browser back, with a key if the provider says who it is and the claim brings a role."""
        answer = RedirectResponse(self._page, 303)
        try:
            admin = await self._signed_in(request)
        except (SignInFailed, AuditUnavailable) as error:
            return self._failed(error)
        self._set_cookie(answer, LOGIN, "", 0, "lax")
        self._set_cookie(answer, HANDOVER, self._sealed(HANDOVER, admin.name, admin.role), HANDOVER_SECONDS, "strict")
        return answer

    async def session(self, request: Request) -> Response:
        """Give the page its key, once: `null` unless an admin has just signed in."""
        key = request.cookies.get(HANDOVER)
        is_known = key is not None and self.admin(key.encode()) is not None
        answer = JSONResponse({"offered": True, "key": key if is_known else None})
        self._set_cookie(answer, HANDOVER, "", 0, "strict")
        return answer

    async def _signed_in(self, request: Request) -> Admin:
        """The admin who has come back from the provider, on record. Raises `SignInFailed` and `AuditUnavailable`."""
        given = request.query_params
        try:
            sealed = request.cookies.get(LOGIN, "").encode()
            kind, state, nonce, verifier = orjson.loads(self._seal.decrypt(sealed, LOGIN_SECONDS))
        except (InvalidToken, ValueError):
            raise SignInFailed("expired", "the browser brought no sign-in that was begun here") from None
        if kind != LOGIN or not secrets.compare_digest(state.encode(), given.get("state", "").encode()):
            raise SignInFailed("expired", "the state is not that of the browser's sign-in")
        if "code" not in given:
            raise SignInFailed("refused", f"the provider answered {given.get('error', 'nothing')!r:.100}")
        claims = await self._provider.claims(given["code"], nonce, verifier, self._claim)
        name, role = name_of(claims), role_of(claim(claims, self._claim), self._roles)
        if role is None:
            raise SignInFailed("no_role", f"{name} ({claims['sub']!r:.100}) has no {self._claim} that brings a role")
        admin = Admin(name, role, b"")
        target = f"{claims['sub']!s:.200} as {role}"
        await self._audit.record(actor_of(admin, request.scope), "admins.sign_in", target, "done")
        return admin

    def _failed(self, error: SignInFailed | AuditUnavailable) -> Response:
        """Back to the page, which tells it."""
        log.warning("an admin could not sign in: %s", error)
        problem = error.problem if isinstance(error, SignInFailed) else "unavailable"
        return RedirectResponse(f"{self._page}?problem={problem}", 303)

    def _sealed(self, *words: str) -> str:
        return self._seal.encrypt(orjson.dumps(words)).decode()

    def _set_cookie(
        self, answer: Response, name: str, value: str, seconds: int, same_site: Literal["lax", "strict"]
    ) -> None:
        answer.set_cookie(
            name, value, seconds, path=self._path, secure=self._is_secure, httponly=True, samesite=same_site
        )
