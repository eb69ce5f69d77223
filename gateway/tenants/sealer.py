"""Seals what is stored of a tenant: compressed, and encrypted by AES-256-GCM (NIST SP 800-38D) under a key of the
tenant, derived from a secret of the deployment. What is sealed for one tenant and name opens for these alone.

    the key's id (4 bytes) | nonce (12) | ciphertext and tag

Secrets are replaced by keeping the old ones beside the new one, until all that was sealed under them is gone.
"""

import hmac
import zlib
from collections.abc import Sequence
from functools import lru_cache
from os import urandom

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.settings.settings import Settings

KEY_ID_BYTES, NONCE_BYTES = 4, 12
MAX_CONTENTS_BYTES = 2**26
_PURPOSE = b"sluice stored responses\0"


class Sealer:
    """Seals under the first of its secrets, and opens what was sealed under any."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = {hmac.digest(secret, b"sluice key id", "sha256")[:KEY_ID_BYTES]: secret for secret in secrets}
        self._key_id = next(iter(self._secrets))
        self._cipher = lru_cache(maxsize=1024)(self._new_cipher)

    @staticmethod
    def of(settings: Settings, pepper: bytes) -> "Sealer":
        """The sealer of these settings: it seals under the first secret, by default one derived from the pepper, and
        opens all.
        """
        newest, old = settings.storage_secret, settings.old_storage_secrets
        secrets = [] if newest is None else [newest.get_secret_value()]
        secrets += [] if old is None else filter(None, map(str.strip, old.get_secret_value().split(",")))
        derived = hmac.digest(pepper, b"sluice storage secret", "sha256")
        return Sealer([*[secret.encode() for secret in secrets], derived])

    def seal(self, tenant: str, name: str, contents: bytes) -> bytes:
        nonce = urandom(NONCE_BYTES)
        sealed = self._cipher(self._key_id, tenant).encrypt(nonce, zlib.compress(contents, 1), name.encode())
        return self._key_id + nonce + sealed

    def open(self, tenant: str, name: str, sealed: bytes, most: int = MAX_CONTENTS_BYTES) -> bytes | None:
        """The contents; None if they were sealed for another tenant or name, or under a removed secret, or are longer
        than `most` bytes.
        """
        key_id, nonce = sealed[:KEY_ID_BYTES], sealed[KEY_ID_BYTES : KEY_ID_BYTES + NONCE_BYTES]
        if key_id not in self._secrets or len(nonce) < NONCE_BYTES:
            return None
        try:
            packed = self._cipher(key_id, tenant).decrypt(nonce, sealed[KEY_ID_BYTES + NONCE_BYTES :], name.encode())
        except InvalidTag:
            return None
        unpacking = zlib.decompressobj()
        contents = unpacking.decompress(packed, 1 + max(0, most))  # 0 would be no bound
        return contents if unpacking.eof and len(contents) <= most else None

    def _new_cipher(self, key_id: bytes, tenant: str) -> AESGCM:
        return AESGCM(hmac.digest(self._secrets[key_id], _PURPOSE + tenant.encode("utf-8", "surrogatepass"), "sha256"))
