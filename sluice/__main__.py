"""This module is the `sluice` command: it runs the command line once it has found the packages to be Sluice's own."""

import sys
from collections.abc import Sequence

from sluice.conflicts import PackageConflict, check_packages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or else the process's own, and return its exit status.

    The status is 1, and one line says why, if a package is not Sluice's.
    """
    try:
        check_packages()
    except PackageConflict as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    from backend import compiled_core  # noqa: PLC0415 - a foreign package must not be imported before the check

    compiled_core.use()
    from gateway.cli import main as command  # noqa: PLC0415 - and nothing of the core before it is known which is used

    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
