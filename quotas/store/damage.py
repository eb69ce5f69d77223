"""What reading a damaged value raises: a key of another type, bytes of another length, no number."""

import struct

from redis.exceptions import ResponseError

DAMAGE = (ResponseError, struct.error, ValueError, OverflowError)
