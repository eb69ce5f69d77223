"""`sluice` with the core that was compiled into the directory which $COMPILED_HOME names."""

import os
import sys
from pathlib import Path

from backend import compiled_core

if __name__ == "__main__":
    compiled_core.home = lambda: Path(os.environ["COMPILED_HOME"])
    assert compiled_core.use()
    from gateway.cli.main import main

    sys.exit(main())
