# SPDX-License-Identifier: Apache-2.0
"""Shows that each regression test fails without its guard: `python tests/prove_guards.py`.

For every change that `guards.txt` lists, the package and the tests are copied to a temporary
folder, the change is made there, and one test is run, which must fail. A change whose old text does
not occur exactly once is stale, and a test of known failures that is not listed is unproved.

Each run is a fork of this process, which has loaded everything that is slow to load but nothing of
what is under test.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
COPIED = ("spin_trtllm", "build_configs")  # and the tests
SLOW_TO_LOAD = ("hypothesis.strategies", "numpy.testing", "safetensors.torch", "torch", "yaml")

# An editable install puts its own finder first, which would load what it was installed from.
COPY_FIRST = (
    "import importlib.machinery, sys\nsys.meta_path.insert(0, importlib.machinery.PathFinder)\n"
)

# Exit codes of a run: pytest's own, and more.
PASSED, FAILED, STALE, NOT_THE_COPY = 0, 1, 90, 91
CAUGHT = "caught"


@dataclass(frozen=True)
class Change:
    """One entry of `guards.txt`: replace `old` by `new` in a file under spin_trtllm."""

    test: str
    file: str
    reason: str
    old: str
    new: str

    def apply(self, package: Path) -> bool:
        """Change the file of a copied package, unless the entry is stale."""
        source = package / self.file
        text = source.read_text(encoding="utf-8") if source.is_file() else ""
        if text.count(self.old) != 1:
            print(f"the old text occurs {text.count(self.old)} times")
            return False
        source.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return True


@dataclass(frozen=True)
class Run:
    """Tests on a copy of the sources, with one change or, to see that they pass, with none."""

    tests: tuple[str, ...]
    change: Change | None = None

    def exit_code(self) -> int:
        """Copy, change, test. Call it in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            for source in (*(TESTS.parent / name for name in COPIED), TESTS):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, Path(folder, source.name), ignore=ignored)
            shutil.copy(TESTS.parent / "pyproject.toml", folder)
            Path(folder, "sitecustomize.py").write_text(COPY_FIRST)  # for processes of tests
            if self.change and not self.change.apply(Path(folder, "spin_trtllm")):
                return STALE
            os.chdir(folder)
            return run_pytest([f"tests/{test}" for test in self.tests])


def run_pytest(tests: Sequence[str]) -> int:
    """Run tests of the copy in the current folder."""
    exec(COPY_FIRST)
    sys.path[0] = os.environ["PYTHONPATH"] = os.getcwd()
    import spin_trtllm

    if not Path(spin_trtllm.__file__).samefile("spin_trtllm/__init__.py"):
        print(f"not the copy: {spin_trtllm.__file__}")
        return NOT_THE_COPY
    # Failing examples are taken as found: to shrink them would take minutes.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("prove", database=None, phases=phases)
    hypothesis.settings.load_profile("prove")
    return int(pytest.main(["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *tests]))


@dataclass
class Forks:
    """Does runs in forks of this process, a few at a time."""

    jobs: int
    verdicts: dict[Run, str] = field(default_factory=dict)
    _logs: dict[int, tuple[Run, IO[bytes]]] = field(default_factory=dict)  # by process

    def do(self, runs: Sequence[Run]) -> None:
        """Fill `verdicts`."""
        for run in runs:
            if len(self._logs) == self.jobs:
                self._wait()
            log = tempfile.TemporaryFile()  # noqa: SIM115 (read and closed in _wait)
            child = os.fork()
            if child == 0:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                code = NOT_THE_COPY
                try:
                    code = run.exit_code()
                except BaseException:  # whatever it was, a fork never returns from here
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)
            self._logs[child] = run, log
        while self._logs:
            self._wait()

    def _wait(self) -> None:
        child, status = os.wait()
        run, log = self._logs.pop(child)
        with log:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no output"]
        code = os.waitstatus_to_exitcode(status)
        known = {PASSED: "NOT NOTICED", FAILED: CAUGHT, STALE: f"STALE, {lines[-1]}"}
        self.verdicts[run] = known.get(code, f"DID NOT RUN, {lines[-1]}")


def read_changes(path: Path) -> Iterator[Change]:
    """The entries of `guards.txt`, whose head describes the form."""
    test = file = reason = ""
    old: list[str] = []
    new: list[str] = []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        mark, text = line[:2], line[2:]
        if mark == "- ":
            old.append(text)
        elif mark == "+ ":
            new.append(text)
        elif old:  # the next entry, or a blank line
            yield Change(test, file, reason, "\n".join(old), "\n".join(new))
            old, new = [], []
        if mark == "~ ":
            file, reason = text.split(": ", 1)
        elif line.startswith(("test_", "trtllm/test_", "triton_server/test_")):
            test = line


def unproved_tests(changes: Sequence[Change]) -> list[str]:
    """Tests of known failures for which no change is listed."""
    listed = {change.test for change in changes}
    tests = [
        f"{path.name}::{item.name}"
        for path in sorted(TESTS.glob("test_known_failures*.py"))
        for item in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")
    ]
    return [test for test in tests if test not in listed]


def main() -> int:
    """Prove every guard; 1 if one of them is not proved."""
    parser = argparse.ArgumentParser(description="Show that each test fails without its guard.")
    parser.add_argument("pattern", nargs="?", default="", help="only tests or files with this text")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    started = time.monotonic()
    changes = list(read_changes(TESTS / "guards.txt"))
    chosen = [change for change in changes if options.pattern in f"{change.file} {change.test}"]
    if not chosen:
        parser.error(f"no guard names {options.pattern!r}")
    for module in SLOW_TO_LOAD:
        importlib.import_module(module)
    sys.dont_write_bytecode = True
    unchanged = Run(tuple(sorted({change.test for change in chosen})))
    runs = [Run((change.test,), change) for change in chosen]
    forks = Forks(options.jobs)
    forks.do([unchanged, *runs])
    open_ends = [f"no guard  {test}" for test in unproved_tests(changes)]
    for run, change in zip(runs, chosen, strict=True):
        verdict, test = forks.verdicts[run], change.test.split("::")[1]
        print(f"{verdict:<8}  {change.file:<27} {test:<71} {change.reason}")
        if verdict != CAUGHT:
            open_ends.append(f"{verdict}: {change.test}, {change.reason}")
    if forks.verdicts[unchanged] != "NOT NOTICED":  # then that they fail proves nothing
        open_ends.append(f"tests fail on unchanged sources: {forks.verdicts[unchanged]}")
    print(f"{len(chosen)} guards, {time.monotonic() - started:.0f} s", *open_ends, sep="\n")
    return int(bool(open_ends))


if __name__ == "__main__":
    sys.exit(main())
