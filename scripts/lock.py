"""Writes the exact versions that the environment has of everything in `pyproject.toml`, with all that those need in turn.

Run by `make lock`. Only names, versions and platform markers are written: where packages come from is each machine's own affair.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Exact versions of everything that the package, its tests, tools and examples need. Written by `make lock`; not to be edited.
"""


def canonical(name: str) -> str:
    """A distribution's name in its one normal spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[Requirement]) -> dict[str, tuple[str, str]]:
    """Canonical name → (version, marker) of the requirements and all that they need here."""
    found: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonical(requirement.name)
        distribution = metadata.distribution(name)
        # A marker of our own (no uvloop on Windows) goes into the lock file; those of others are decided by pip when it installs.
        marker = str(requirement.marker) if requirement in requirements and requirement.marker else ""
        found.setdefault(name, (distribution.version, marker))
        for wanted in requirement.extras | {""}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in distribution.requires or []]
    return found


def main() -> int:
    """Write `requirements-dev.lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pinned = closure([Requirement(line) for line in lines])
    text = HEADER + "".join(
        f"{name}=={version}{f' ; {marker}' if marker else ''}\n" for name, (version, marker) in sorted(pinned.items())
    )
    (ROOT / "requirements-dev.lock").write_text(text)
    print(f"{len(pinned)} packages pinned in requirements-dev.lock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
