"""The licence of every package that the package and its extras bring, direct or not; fails where one names none."""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution


def licence(package: Distribution) -> str:
    """What a package says about its licence, in a few words."""
    about = package.metadata
    named = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if line.startswith("License ::")]
    plain = (about.get("License") or "").strip().splitlines()
    return about.get("License-Expression") or ", ".join(named) or (plain[0][:60] if plain else "")


def brought_by(name: str, extras: set[str], known: dict[str, Distribution]) -> None:
    """Collect a package's requirements, those of its extras included, as far as they are installed."""
    for line in distribution(name).requires or ():
        requirement, _, condition = line.partition(";")
        wanted = re.findall(r"extra == ['\"]([\w-]+)['\"]", condition)
        if wanted and not extras.intersection(wanted):
            continue
        found = re.match(r"([\w.-]+)(?:\[([\w, -]+)\])?", requirement.strip())
        assert found is not None
        other = found.group(1).lower().replace("_", "-")
        inner = set((found.group(2) or "").replace(" ", "").split(",")) - {""}
        if other == name:
            brought_by(name, inner, known)
        elif other not in known:
            try:
                known[other] = distribution(other)
            except PackageNotFoundError:
                continue
            brought_by(other, inner, known)


def main() -> int:
    """Print the table."""
    known: dict[str, Distribution] = {}
    brought_by("vbtta", {"all"}, known)
    for name, package in sorted(known.items()):
        print(f"{name:32} {package.version:16} {licence(package) or 'NONE NAMED'}")
    missing = [name for name, package in known.items() if not licence(package)]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
