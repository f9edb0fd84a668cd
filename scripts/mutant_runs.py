"""Runs tests/laws against mutants of octavo.kv, in forked children of one process that has collected the tests.

First the tests run unchanged, and which test runs which line is noted. A mutant is then met by the tests that run its
line alone, those that killed its neighbours and quick ones first. Its function gets the changed code where it stands;
what runs at import is imported again with one file changed. Limits are CPU time: a busy machine kills no mutant.
"""

from __future__ import annotations

import ast
import gc
import itertools
import mmap
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from mutants import Mutant, spoiled_tree

REPO = Path(__file__).resolve().parents[1]
NOT_RUN = {"test_pure.py", "test_invariants_doc.py"}  # they read sources and documents
MEANT_FOR = {
    "balance.py": "test_planted.py", "balance_tree.py": "test_planted.py", "balance_tiers.py": "test_tiers.py",
    "tiers.py": "test_ti", "ledger_tiers.py": "test_tickets.py", "ledger_transfers.py": "test_transfers.py",
    "sizing.py": "test_tables.py", "sliding.py": "test_tables.py", "pages.py": "test_tables.py",
    "pool.py": "test_pool.py", "prefix.py": "test_prefix.py", "heap.py": "test_prefix.py",
    "policy.py": "test_trace.py", "trace.py": "test_trace.py", "replay.py": "test_trace.py",
    "replay_tiers.py": "test_replay_tiers.py",
    "offload.py": "test_offload.py", "tiered_pool.py": "test_tickets.py", "node.py": "test_prefix.py",
    "picture.py": "test_picture.py", "report.py": "test_picture.py", "ledger.py": "test_ledger.py",
}  # fmt: skip
SIMULATED_MOVES = 6_000
WATCHED_CALLS = 200
MEMORY_BYTES = 4 << 30
LONGEST_S = 900  # of wall time, for a child that waits for nothing
Line = tuple[str, int]


def snapshot(folder: Path) -> None:
    """Copy sources and tests: whoever edits them meanwhile does not change what is tested."""
    package = folder / "octavo"
    shutil.copytree(REPO / "src" / "octavo" / "kv", package / "kv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "src" / "octavo" / "errors.py", package)
    (package / "__init__.py").touch()
    for part in ("tests/laws", "examples"):
        shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", *NOT_RUN))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = soak\n")


def overlay(folder: Path, mutant: Mutant | None, into: Path) -> None:
    """A package `octavo` as in the snapshot, one file of it changed."""
    kv = into / "octavo" / "kv"
    kv.mkdir(parents=True)
    for name in ("__init__.py", "errors.py"):
        (into / "octavo" / name).symlink_to(folder / "octavo" / name)
    for file in (folder / "octavo" / "kv").glob("*.py"):
        if mutant is not None and file.name == mutant.file:
            with spoiled_tree(file, mutant) as tree:
                (kv / file.name).write_text(ast.unparse(tree))
        else:
            (kv / file.name).symlink_to(file)


class Tracer:
    """Notes which lines of files in `folder` run. A function that is called often counts as run whole (a test may
    be taken for one that runs a line, never the other way round): watching it on would take longer than the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._elsewhere: dict[int, CodeType] = {}
        self.start()

    def start(self) -> None:
        self.lines: set[Line] = set()
        self._calls_left: dict[int, int] = {}
        sys.settrace(self._call)

    def stop(self) -> set[Line]:
        sys.settrace(None)
        return self.lines

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if id(code) in self._elsewhere:
            return None
        left = self._calls_left.get(id(code))
        if left is None:
            if not code.co_filename.startswith(self._folder):
                self._elsewhere[id(code)] = code
                return None
            left = WATCHED_CALLS
        if left == 1:
            self.lines.update((Path(code.co_filename).name, line) for *_, line in code.co_lines() if line)
        if left <= 1:
            self._calls_left[id(code)] = 0
            return None
        self._calls_left[id(code)] = left - 1
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self.lines.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        return self._line


class Fresh:
    """Pytest plugin: `work` gets the collected tests instead of pytest; the first failure ends the process, before
    any report is made."""

    def __init__(self, work: Callable[[list[pytest.Item]], None]) -> None:
        self._work = work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._work(session.items)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            sys.stderr.write(report.longreprtext + "\n")
            os._exit(1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from _or_exit())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from _or_exit())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        return (yield from _or_exit())


def _or_exit() -> Iterator[None]:
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        _tell(error)
        os._exit(1)


def _tell(error: BaseException) -> None:
    if os.environ.get("OCTAVO_MUTANT_ERRORS"):
        sys.excepthook(type(error), error, error.__traceback__)


def collect(folder: Path, files: Sequence[str], work: Callable[[list[pytest.Item]], None]) -> None:
    """Let pytest collect test files of the snapshot and call `work` with the tests."""
    options = ["-s", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:terminal", "-m", "not soak"]
    where = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    pytest.main([*options, *where, *(str(folder / "tests" / "laws" / file) for file in files)], plugins=[Fresh(work)])


def prepare(*first: Path) -> None:
    """Imports of this process: `octavo`, the tests and examples come from these folders alone."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to load than most tests to fail
    os.environ["OCTAVO_LAW_MOVES"] = str(SIMULATED_MOVES)
    os.environ["OCTAVO_LAW_PROFILE"] = "mutants"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("octavo", "tests", "examples")]:
        del sys.modules[name]
    # An installed octavo may come with an import hook of its own.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
    sys.path[:0] = map(str, first)
    import octavo

    if not str(octavo.__file__).startswith(str(first[0])):
        raise ImportError(f"octavo comes from {octavo.__file__}, not from {first[0]}")


class Bench:
    """The collected tests, what they run and how long they take; made once, inherited by every child."""

    def __init__(self, folder: Path, items: list[pytest.Item], at_import: set[Line]) -> None:
        self.folder, self.items, self.at_import = folder, {item.nodeid: item for item in items}, at_import
        self.functions = _functions(folder)
        self.seconds: dict[str, float] = {}
        self.tests_of: dict[Line, list[str]] = defaultdict(list)
        self.kills: Counter[tuple[str, object]] = Counter()  # by test, and file or function of the mutant
        self._at = mmap.mmap(-1, 8)  # index of the test that a child has begun

    def record(self, kept: Path | None = None) -> None:
        """Run every test unchanged; with a file `kept` only those that it does not know as they are now. Exits if
        one fails: then nothing can be said of mutants."""
        known: dict[str, tuple[str, float, set[Line]]] = {}
        if kept is not None and kept.exists():
            known = pickle.loads(kept.read_bytes())
        digests = {name: self._digest(item.path) for name, item in self.items.items()}
        known = {name: note for name, note in known.items() if digests.get(name) == note[0]}
        missing = [name for name in self.items if name not in known]
        notes = self.folder / "lines.pickle"
        if not self._child(lambda: self._record(missing, notes), missing):
            sys.exit(f"mutants: without any change this fails: {missing[self._reached()]}")
        if missing:
            known |= {name: (digests[name], *note) for name, note in pickle.loads(notes.read_bytes()).items()}
        for name, (_, seconds, lines) in known.items():
            self.seconds[name] = seconds
            for line in lines:
                self.tests_of[line].append(name)
        if kept is not None:
            kept.write_bytes(pickle.dumps(known))

    def _digest(self, test: Path) -> str:
        """Changes with the sources, with what tests share, and with this file of tests."""
        shared = [file for file in test.parent.glob("*.py") if not file.name.startswith("test_")]
        golden = test.parent.glob("golden/*") if b"golden" in test.read_bytes() else []
        files = sorted([*(self.folder / "octavo").rglob("*.py"), *shared, *golden])
        return sha256(b"".join(file.read_bytes() for file in [*files, test])).hexdigest()

    def _record(self, names: Sequence[str], notes: Path) -> None:
        for file in (self.folder / "octavo" / "kv").glob("*.py"):
            self._patch(file, None)  # as for a mutant, so that it is known to change nothing by itself
        tracer, found = Tracer(self.folder / "octavo" / "kv"), {}
        for index, item in enumerate(self.items[name] for name in names):
            self._note(index)
            begin = time.process_time()
            tracer.start()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            found[item.nodeid] = time.process_time() - begin, tracer.stop()
        notes.write_bytes(pickle.dumps(found))

    def check_import(self) -> None:
        """Run the quick tests in a package imported again, unchanged."""
        quick = [name for name, seconds in self.seconds.items() if seconds < 0.1]
        if not self._passes_anew(None, quick):
            sys.exit(f"mutants: imported again without any change, this fails: {quick[self._reached()]}")

    def meet(self, mutant: Mutant, passed: frozenset[str], budget_s: float) -> tuple[str, frozenset[str]]:
        """Run tests against a mutant, without those it has `passed`, until they have taken `budget_s` or all ran.
        Returns "killed", "survived" or "open", and the tests it has passed."""
        lines = {(mutant.file, line) for line in range(mutant.first_line, mutant.last_line + 1)}
        if mutant.function is not None:
            covering = {name for line in lines for name in self.tests_of.get(line, ())}
            names = self._within(budget_s, self.order(mutant, covering - passed))
            file = self.folder / "octavo" / "kv" / mutant.file
            if not self._child(lambda: self._run(names, file, mutant), names):
                return self._killed(mutant, names)
            passed |= set(names)
            if covering - passed:
                return "open", passed
            if not lines & self.at_import:
                return "survived", passed
            passed = frozenset()
        names = self._within(budget_s, self.order(mutant, self.items.keys() - passed))
        if not self._passes_anew(mutant, names):
            return self._killed(mutant, names)
        passed |= set(names)
        return ("open" if self.items.keys() - passed else "survived"), passed

    def order(self, mutant: Mutant, names: Iterable[str]) -> list[str]:
        """Likely killers and quick tests first."""

        def cost(name: str) -> tuple[float, str]:
            kills = 5 if MEANT_FOR.get(mutant.file, "?") in name else 0
            kills += self.kills[name, mutant.file] + 50 * self.kills[name, (mutant.file, mutant.function)]
            return max(self.seconds[name], 0.001) / (1 + kills), name

        return sorted(names, key=cost)

    def _within(self, budget_s: float, names: list[str]) -> list[str]:
        ends = itertools.accumulate(self.seconds[name] for name in names)
        return [name for index, (name, end) in enumerate(zip(names, ends, strict=True)) if end <= budget_s or not index]

    def _killed(self, mutant: Mutant, names: Sequence[str]) -> tuple[str, frozenset[str]]:
        for where in (mutant.file, (mutant.file, mutant.function)):
            self.kills[names[self._reached()], where] += 1
        return "killed", frozenset()

    def _passes_anew(self, mutant: Mutant | None, names: list[str]) -> bool:
        with tempfile.TemporaryDirectory(prefix="mutant") as folder:
            overlay(self.folder, mutant, Path(folder))

            def run() -> None:
                prepare(Path(folder), self.folder)
                files = dict.fromkeys(name.partition("::")[0].rpartition("/")[2] for name in names)
                collect(self.folder, list(files), run_in_order)

            def run_in_order(items: list[pytest.Item]) -> None:
                found = {item.nodeid: item for item in items}
                self._run_items([found[name] for name in names])
                os._exit(0)

            return self._child(run, names, code_if_done=1)  # it exits from within

    def _run(self, names: Sequence[str], file: Path, mutant: Mutant) -> None:
        self._patch(file, mutant)
        self._run_items([self.items[name] for name in names])

    def _run_items(self, items: Sequence[pytest.Item]) -> None:
        for index, item in enumerate(items):
            self._note(index)
            signal.setitimer(signal.ITIMER_PROF, 5 + 10 * self.seconds[item.nodeid])
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)

    def _patch(self, file: Path, mutant: Mutant | None) -> None:
        """Give the functions of a file the code of its (changed) source."""
        with spoiled_tree(file, mutant) as tree:
            module = compile(tree, str(file), "exec", dont_inherit=True)
        for code in _codes(module):
            key = (code.co_qualname, code.co_firstlineno)
            if mutant is None or key == mutant.function:
                for function in self.functions.get((str(file), *key), ()):
                    function.__code__ = code

    def _child(self, work: Callable[[], None], names: Sequence[str], code_if_done: int = 0) -> bool:
        """Do `work` in a forked child. Whether it came to its end, with every test passed."""
        if not names:
            return True
        self._at = mmap.mmap(-1, 8)  # this child's alone: other workers' children note where they are, too
        with tempfile.TemporaryDirectory(prefix="mutant") as folder:
            child = os.fork()
            if child == 0:
                try:
                    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
                    if not os.environ.get("OCTAVO_MUTANT_ERRORS"):
                        quiet = os.open(os.devnull, os.O_WRONLY)
                        os.dup2(quiet, 1)
                        os.dup2(quiet, 2)
                    for number in (signal.SIGPROF, signal.SIGALRM):
                        signal.signal(number, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                    work()
                    os._exit(code_if_done)
                except BaseException as error:
                    _tell(error)
                finally:
                    os._exit(1)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def _note(self, index: int) -> None:
        self._at[:] = index.to_bytes(8, "little")

    def _reached(self) -> int:
        return int.from_bytes(self._at[:], "little")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code of functions, methods included, functions inside functions not."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if "<" not in inner.co_qualname:
                yield inner
            yield from _codes(inner)


def _functions(folder: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Functions that exist, by file, name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(str(folder / "octavo")):
            code = thing.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
    return dict(found)


def with_bench(folder: Path, kept: Path | None, work: Callable[[Bench], None]) -> None:
    """Collect the tests of a snapshot, run them once (see `Bench.record`), and call `work`."""
    import hypothesis.stateful  # noqa: F401  loaded once, inherited by the children
    import numpy  # noqa: F401

    prepare(folder)
    tracer = Tracer(folder / "octavo" / "kv")

    def begin(items: list[pytest.Item]) -> None:
        bench = Bench(folder, items, tracer.stop())
        gc.collect()
        gc.freeze()
        bench.record(kept)
        work(bench)

    collect(folder, ["."], begin)
