"""The `sluice` command, once it is known that the packages it runs are Sluice's own."""

import sys

from sluice.conflicts import PackageConflict, check_packages


def main() -> int:
    """Run the command and return its exit status: 1, with one line that says why, if a package is not Sluice's."""
    try:
        check_packages()
    except PackageConflict as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    from gateway.cli import main as command  # noqa: PLC0415 - a foreign package must not be imported before the check

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
