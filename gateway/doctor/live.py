"""Reads a running gateway over its admin port."""

import time
from typing import Any, Self

import httpx

from gateway.doctor.finding import Finding
from gateway.doctor.history import Figure
from gateway.doctor.snapshot import PATHS, DoctorError, Snapshot

ANSWER_SECONDS = 10.0  # for one answer


class LiveGateway:
    """A client of the admin port at `url` with the admin key `key`.

    TLS is checked against the system's authorities, or those of `SSL_CERT_FILE`.
    """

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(timeout=ANSWER_SECONDS, headers={"authorization": f"Bearer {key}"})
        self._url = url.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def is_router(self) -> bool:
        """True for a router's admin port, which answers for all its replicas. Raises `DoctorError`."""
        return self._ask("/admin/v1/fleet").status_code == httpx.codes.OK

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the gateway as it is now. Raises `DoctorError`."""
        metrics = self._get("/metrics").text
        at = time.monotonic()
        answers = {name: self._json(f"/admin/v1/{name}") for name in PATHS}
        try:
            return Snapshot.of(at, metrics, answers)
        except (KeyError, TypeError, ValueError) as error:
            raise self._foreign(error) from None

    def own_findings(self) -> list[Finding]:
        """The gateway's diagnosis of itself, the last minutes included, or a router's of itself and of its replicas.
        Raises `DoctorError`.
        """
        answer = self._json("/admin/v1/diagnosis")
        try:
            return [Finding.of(found) for found in answer["findings"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._foreign(error) from None

    def history(self, seconds: float) -> tuple[list[Finding], list[Figure]]:
        """The troubles and the figures of the last `seconds`. Raises `DoctorError`."""
        answer = self._json(f"/admin/v1/diagnosis?last={seconds:.0f}")
        try:
            figures = [Figure(str(one["name"]), str(one["value"]), str(one["meaning"])) for one in answer["figures"]]
            return [Finding.of(found) for found in answer["findings"]], figures
        except (KeyError, TypeError, ValueError) as error:
            raise self._foreign(error) from None

    def _foreign(self, error: Exception) -> DoctorError:
        return DoctorError(f"{self._url} answers as no gateway of this version does ({type(error).__name__}: {error})")

    def _json(self, path: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._get(path).json()
        except ValueError:
            raise DoctorError(f"{self._url}{path} is no JSON: is it the admin port of a gateway?") from None
        return answer

    def _ask(self, path: str) -> httpx.Response:
        try:
            return self._client.get(f"{self._url}{path}")
        except httpx.ConnectError as error:
            raise self._unread("nothing listens there" if "refused" in str(error) else str(error)) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError):
            raise self._unread("it is no URL such as http://127.0.0.1:8001") from None
        except httpx.HTTPError as error:
            raise self._unread(str(error) or type(error).__name__) from None

    def _unread(self, reason: str) -> DoctorError:
        remedy = "name the admin port of a running gateway, as announced"
        return DoctorError(f"{self._url} cannot be read ({reason}): {remedy}")

    def _get(self, path: str) -> httpx.Response:
        response = self._ask(path)
        if response.status_code == 401:
            raise DoctorError(f"{self._url} does not accept this key: name the file of its admin key with --key-file")
        if response.status_code != 200:
            raise DoctorError(
                f"{self._url}{path} answers {response.status_code}: is it the admin port of a gateway, and not the "
                "tenants' port?"
            )
        return response
