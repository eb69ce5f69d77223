"""This module finds out whether the packages that Sluice is made of are Sluice's own.

A wheel puts `fleet`, `gateway`, `admission`, `quotas` and `backend` into site-packages, beside `sluice`. When another
distribution has a package of such a name, pip says nothing: the files of the one that is installed last replace those
of the other, and uninstalling one removes files that both have. Whichever came last, the environment holds a mixture of
two programs, so Sluice refuses to run in it.
"""

from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("sluice", "fleet", "gateway", "admission", "quotas", "backend")
DISTRIBUTION = "sluice_gateway"  # as a wheel spells its name
HOME = Path(__file__).resolve().parent.parent  # the directory that holds this package, and should hold the others
_REMEDY = "Install Sluice into an environment of its own."


class PackageConflict(ImportError):
    """A package of Sluice's is missing or is not Sluice's alone; the message names the other distribution."""


def check_packages() -> None:
    """Raise `PackageConflict` unless Python finds all packages beside each other, and they hold no files of others.

    It imports none of them, and reads the RECORD of each distribution that is installed beside Sluice.
    """
    for package in PACKAGES:
        place = _place(package)
        if place is None or place.resolve() != HOME:
            raise PackageConflict(_elsewhere(package, place))
    for owner, package in _other_owners(HOME):
        raise PackageConflict(
            f"{owner} has a package `{package}`, as Sluice has: they share {HOME / package}, where the one that was "
            f"installed last has replaced files of the other. {_REMEDY}"
        )


def _place(package: str) -> Path | None:
    """Return the directory from which Python would import `package`, or None if it has no `__init__.py` anywhere."""
    spec = find_spec(package)
    return Path(spec.origin).parent.parent if spec is not None and spec.origin is not None else None


def _elsewhere(package: str, place: Path | None) -> str:
    if place is None:
        return (
            f"Sluice's package `{package}` is missing from {HOME}, perhaps because another distribution with a package "
            f"of this name was uninstalled. Reinstall Sluice, into an environment of its own."
        )
    owners = [owner for owner, owned in _other_owners(place) if owned == package]
    owner = owners[0] if owners else "something that no distribution has recorded"
    return f"`import {package}` finds {place / package}, of {owner}, instead of Sluice's, which is in {HOME}. {_REMEDY}"


def _other_owners(directory: Path) -> list[tuple[str, str]]:
    """Return the other distributions that have files in a package of ours in `directory`, each with the package."""
    found = []
    for record in sorted(directory.glob("*.dist-info/RECORD")):
        paths = b"\n" + record.read_bytes()
        packages = [package for package in PACKAGES if b"\n%s/" % package.encode() in paths]
        if packages and not record.parent.name.startswith(f"{DISTRIBUTION}-"):
            metadata = Distribution.at(record.parent).metadata
            found.append((f"the distribution {metadata['Name']} {metadata['Version']}", packages[0]))
    return found
