"""Mutation testing of src/octavo/kv: does tests/laws notice when a line is wrong?

    python scripts/mutate.py                       every mutant (long)
    python scripts/mutate.py --sample 60 --seed 1  a fixed sample
    python scripts/mutate.py --files sizing.py     one file

Each mutant (scripts/mutants.py) is met by the tests that run its line (scripts/mutant_runs.py). One that passes all of
them survives; tests/laws/survivors.txt lists those that are equivalent, with the reason. Prints `N generated,
N killed, N listed`; exit status 1 if one survived unlisted.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from mutant_runs import REPO, Bench, snapshot, with_bench
from mutants import Mutant, mutants_of

QUICK_S = 1.5  # what tests may take in the first round
SURVIVORS = REPO / "tests" / "laws" / "survivors.txt"


def listed_survivors() -> dict[str, str]:
    """Pattern of mutant keys -> why those mutants change nothing that can be observed."""
    found: dict[str, str] = {}
    for line in SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []:
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.partition(" | ")
            if not reason.strip():
                sys.exit(f"{SURVIVORS.name}: no reason for {pattern}")
            found[pattern.strip()] = reason.strip()
    return found


def is_listed(mutant: Mutant, patterns: dict[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(mutant.key, pattern.replace("[", "[[]")) for pattern in patterns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many mutants, the same for the same --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", help="only these files of kv/")
    parser.add_argument(
        "--results",
        type=Path,
        help="JSON file of outcomes: finished mutants are not run again; beside it FILE.lines, what tests ran",
    )
    parser.add_argument("--again", action="store_true", help="run those of --results that survived again")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop starting mutants after so long")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octavo-kv") as name:
        folder = Path(name).resolve()
        snapshot(folder)
        files = sorted(file for file in (folder / "octavo" / "kv").glob("*.py") if file.stem != "__init__")
        mutants = [mutant for file in files if not args.files or file.name in args.files for mutant in mutants_of(file)]
        if args.sample:
            mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
        if args.list:
            print("\n".join(f"{m.line:4} {m.key}" for m in mutants))
            return 0
        outcomes = outcomes_so_far(mutants, args.results, args.again)
        left = [mutant for mutant in mutants if mutant.key not in outcomes]
        if left:
            kept = args.results.with_suffix(".lines") if args.results else None
            with_bench(folder, kept, lambda bench: run(bench, left, outcomes, args.results, args.limit_s, args.jobs))
    found = [outcomes.get(mutant.key, "not run") for mutant in mutants]
    print(f"{len(mutants)} generated, {found.count('killed')} killed, {found.count('listed')} listed", end="")
    print("".join(f", {found.count(word)} {word}" for word in ("survived", "open", "not run") if word in found))
    return 0 if {"killed", "listed"}.issuperset(found) else 1


def outcomes_so_far(mutants: list[Mutant], results: Path | None, again: bool) -> dict[str, str]:
    """Outcomes by key: what an earlier run found, and what the list says."""
    outcomes: dict[str, str] = json.loads(results.read_text()) if results and results.exists() else {}
    dropped = ("open", "survived") if again else ("open",)
    outcomes = {key: outcome for key, outcome in outcomes.items() if outcome not in dropped}
    patterns = listed_survivors()
    return outcomes | {m.key: "listed" for m in mutants if m.key not in outcomes and is_listed(m, patterns)}


def run(
    bench: Bench, left: list[Mutant], outcomes: dict[str, str], results: Path | None, limit_s: float, jobs: int
) -> None:
    """Run mutants, note their outcomes, print who survived. Long tests come when all have met quick ones."""
    start = time.monotonic()
    if any(mutant.function is None for mutant in left):
        bench.check_import()
    met: list[tuple[Mutant, frozenset[str]]] = [(mutant, frozenset()) for mutant in left]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _inherit, (bench,)) as pool:
        for budget_s in (QUICK_S, float("inf")):
            todo, met = met, []
            ends = pool.map(_meet, todo, itertools.repeat(budget_s))
            for number, ((mutant, _), (outcome, passed)) in enumerate(zip(todo, ends, strict=False), 1):
                outcomes[mutant.key] = outcome
                if outcome == "open":
                    met.append((mutant, passed))
                if outcome == "survived":
                    print(f"survived: {mutant.file}:{mutant.line} {mutant.key}", flush=True)
                if results:
                    part = results.with_suffix(".part")
                    part.write_text(json.dumps(outcomes, indent=0))
                    part.replace(results)
                if number % 50 == 0:
                    print(f"{number} of {len(todo)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
                if time.monotonic() - start > limit_s:
                    pool.shutdown(cancel_futures=True)
                    return


_bench: Bench | None = None  # of a worker process


def _inherit(bench: Bench) -> None:
    global _bench
    _bench = bench


def _meet(met: tuple[Mutant, frozenset[str]], budget_s: float) -> tuple[str, frozenset[str]]:
    if _bench is None:
        raise RuntimeError("no bench in this process")
    return _bench.meet(*met, budget_s)


if __name__ == "__main__":
    sys.exit(main())
