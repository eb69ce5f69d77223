"""A small OpenID Connect provider: it signs everybody in, checks PKCE and its client, and can be made to lie."""

import hmac
import json
import time
from base64 import b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

KEY = RSAKey.generate_key(2048, {"kid": "k1"})
CLIENT, SECRET = "sluice", "secret of the client / ü"


class OidcProvider:
    """A provider at `issuer`; `claims` are those of the user who signs in."""

    def __init__(self, issuer: str = "https://login.example") -> None:
        self.issuer = issuer
        self.claims: dict[str, Any] = {
            "sub": "u1",
            "email": "ada@example.com",
            "email_verified": True,
            "groups": ["ops", "staff"],
        }
        self.userinfo: dict[str, Any] = {}
        self.lies: dict[str, Any] = {}  # claims of the ID token that replace true ones
        self.algorithm = "RS256"
        self.keys = [KEY]
        self.error: str | None = None  # what the user's answer is, in place of a code
        self._codes: dict[str, dict[str, str]] = {}
        self.num_metadata = 0
        self.app = Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._metadata),
                Route("/jwks", self._jwks),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
                Route("/userinfo", self._userinfo),
            ]
        )

    async def _metadata(self, request: Request) -> Response:
        self.num_metadata += 1
        addresses = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks"}
        told = {name: f"{self.issuer}/{path}" for name, path in addresses.items()}
        return JSONResponse({"issuer": self.issuer, "userinfo_endpoint": f"{self.issuer}/userinfo", **told})

    async def _jwks(self, request: Request) -> Response:
        return JSONResponse(KeySet(self.keys).as_dict(private=False))

    async def _authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert asked["client_id"] == CLIENT
        assert asked["code_challenge_method"] == "S256"
        back = {"error": self.error} if self.error else {"code": f"code-{len(self._codes)}"}
        self._codes[back.get("code", "")] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode(back | {'state': asked['state']})}", 302)

    async def _token(self, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode()))
        asked = self._codes.pop(form["code"], None)
        challenge = urlsafe_b64encode(sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
        basic = b64decode(request.headers.get("authorization", "").removeprefix("Basic ")).decode()
        is_client = tuple(map(unquote, basic.split(":"))) == (CLIENT, SECRET) or form.get("client_id") == CLIENT
        if asked is None or challenge != asked["code_challenge"] or not is_client:
            return JSONResponse({"error": "invalid_grant"}, 400)
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": asked["nonce"]}
        claims |= self.claims | self.lies
        token = self._signed(claims)
        return JSONResponse({"access_token": "at", "token_type": "Bearer", "id_token": token})

    def _signed(self, claims: dict[str, Any]) -> str:
        key = self.keys[-1]
        if self.algorithm == "RS256":
            return jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key, algorithms=["RS256"])
        parts = ({"alg": self.algorithm, "kid": key.kid}, claims)
        text = b".".join(urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
        mac = hmac.digest(key.as_pem(private=False), text, "sha256") if self.algorithm == "HS256" else b""
        return (text + b"." + urlsafe_b64encode(mac).rstrip(b"=")).decode()

    async def _userinfo(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer at"
        return JSONResponse(self.claims | self.userinfo)
