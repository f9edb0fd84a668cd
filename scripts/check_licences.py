"""Fail on a run-time dependency whose licence is not on the list.

    python scripts/check_licences.py [--list]

Walks the installed requirements of `octavo[all,cluster]` (test and development extras are not shipped to users).
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

# Permissive licences, as words found in package metadata.
ALLOWED = re.compile(
    r"\b(MIT(-CMU|-0)?|BSD|BSD-[23]-Clause|0BSD|Apache|Apache-2\.0|ISC(L)?|PSF(-2\.0)?|Python Software Foundation|Zlib|"
    r"Unlicense|CC0-1\.0|HPND|MPL|MPL-2\.0|Mozilla Public License|BSL-1\.0|Boost)\b",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"\b(A?GPL|GNU (Affero )?General Public|SSPL|Commons Clause|Proprietary)\b", re.IGNORECASE)
# Metadata that names no licence, or names it in words of its own: what its licence file says, read by us.
KNOWN = {
    "mpmath": "BSD-3-Clause",
}
# Libraries the CUDA build of torch brings: NVIDIA's redistributable licence, never in our artefacts.
NOT_OURS = re.compile(r"^(nvidia-|triton|cuda-)")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(dist: Distribution) -> str:
    """What the package says of its licence: expression, field, classifiers."""
    meta = dist.metadata
    name = normal(meta["Name"])
    if name in KNOWN:
        return KNOWN[name]
    classifiers = [c.rpartition(" :: ")[2] for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    field = (meta.get("License") or "").strip().splitlines()[:1]
    return "; ".join(filter(None, [meta.get("License-Expression") or "", *field, *classifiers]))


def runtime_distributions(root: str, extras: set[str]) -> dict[str, Distribution]:
    """Every installed distribution `root[extras]` needs, by normalised name. Markers decide, as pip does."""
    from packaging.requirements import Requirement

    found: dict[str, Distribution] = {}
    todo = [(root, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is needed at run time and not installed; run `make setup`") from None
        found[normal(name)] = dist
        for line in dist.requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
                todo.append((normal(requirement.name), frozenset(requirement.extras)))
    return found


def main() -> int:
    show, bad = "--list" in sys.argv[1:], []
    for name, dist in sorted(runtime_distributions("octavo", {"all", "cluster"}).items()):
        if name == "octavo" or NOT_OURS.match(name):
            continue
        licence = licence_of(dist)
        if show:
            print(f"{name:24} {dist.version:16} {licence}")
        if not ALLOWED.search(licence) or FORBIDDEN.search(licence):
            bad.append(f"{name} {dist.version}: {licence or 'no licence named'}")
    for line in bad:
        print(f"licence not on the list: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
