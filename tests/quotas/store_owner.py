"""A gateway as far as the embedded store is concerned: holds one, and settles after a Ctrl-C, before it stops it.

`python -m tests.quotas.store_owner STATE_DIR` prints the server's process id.
"""

import signal
import sys
from pathlib import Path

from redis import Redis

from quotas.embedded.embedded_store import EmbeddedStore


def main(state_dir: Path) -> None:
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with EmbeddedStore(state_dir) as url, Redis.from_url(url) as client:
        sys.stdout.write(f"{client.info('server')['process_id']}\n")
        sys.stdout.flush()
        signal.sigwait(signals)
        client.set("settled", "after the signal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
