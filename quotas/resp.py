"""Commands as bytes of the Redis protocol (RESP), so that what never changes is encoded once."""


def words(*arguments: bytes) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


def command(*arguments: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(arguments), words(*arguments))
