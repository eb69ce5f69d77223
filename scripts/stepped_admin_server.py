"""`sluice` that counts the CPU time for which requests to its admin port hold the event loop: at its end it says
the most of each path on stderr.
"""

import atexit
import json
import sys
import time
from collections.abc import Coroutine, Generator
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.admin.endpoint import AdminEndpoint
from gateway.cli.main import main

MARK = "longest holds of the loop: "
longest: dict[str, float] = {}


class _Stepped:
    def __init__(self, coroutine: Coroutine[Any, Any, None], path: str) -> None:
        self._coroutine, self._path = coroutine, path

    def __await__(self) -> Generator[Any, Any, None]:
        sent: Any = None
        failure: BaseException | None = None
        while True:
            began = time.thread_time()
            try:
                waited = self._coroutine.send(sent) if failure is None else self._coroutine.throw(failure)
            except StopIteration:
                return
            finally:
                longest[self._path] = max(longest.get(self._path, 0.0), time.thread_time() - began)
            failure = None
            try:
                sent = yield waited
            except BaseException as error:  # noqa: BLE001 - it goes on to the coroutine
                failure = error


_answer = AdminEndpoint.__call__


async def _stepped(self: AdminEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
    query = scope["query_string"].decode()
    await _Stepped(_answer(self, scope, receive, send), scope["path"] + (f"?{query}" if query else ""))


if __name__ == "__main__":
    AdminEndpoint.__call__ = _stepped  # type: ignore[method-assign]
    atexit.register(lambda: sys.stderr.write(f"{MARK}{json.dumps(longest)}\n"))
    sys.exit(main())
