"""Do tests notice? python -m benchmarks.mutation [--mutants 500] [--seed 0] [--minutes 60] [--out results/mutation].

A mutant is one changed operator, number, comparison or condition of `src/vbtta/models` or `src/vbtta/inference`, drawn
at random. It is killed when a test of `tests/test_contract.py` or `tests/test_golden.py` that reaches the changed line
fails: golden answers first, then three cases of every property of the contract, in the order of their time. Finished
mutants are kept under --work, and the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from reproduction.provenance import provenance
from vbtta._support.files import atomic_path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/vbtta/models", "src/vbtta/inference")
TESTS = ("tests/test_contract.py", "tests/test_golden.py")
SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Lt: ast.LtE,
    ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
CALLS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "argmax": "argmin"}
MOST_SECONDS = 900  # of the processor, beyond which a mutant counts as killed: an endless loop
MOST_CASES = 3  # of a property of the contract that are tried on a mutant, besides all golden answers that reach it


class Mutant(NamedTuple):
    """A place in a file and the text that replaces it."""

    file: str
    line: int  # of the change
    lines: tuple[int, int]  # of its statement
    start: int  # bytes
    end: int
    text: str
    function: str  # "" where it runs on import


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = (ROOT / file).read_bytes()
    starts = np.concatenate([[0], np.cumsum([len(line) for line in source.splitlines(keepends=True)])])
    yield from _of(ast.parse(source), file, starts, (0, 0), "")


def _of(node: ast.AST, file: str, starts: Any, lines: tuple[int, int], function: str) -> Iterator[Mutant]:
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        lines = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
    if isinstance(node, ast.expr):
        start, end = (
            int(starts[line - 1]) + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        )
        for text in _changes(node):
            yield Mutant(file, node.lineno, lines, start, end, text, function)
    inner = f"{function}.{node.name}".strip(".") if isinstance(node, ast.FunctionDef) else function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "slice" if isinstance(node, ast.Subscript) else "") and (
            name != "slice" or isinstance(value, ast.Constant)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _of(child, file, starts, lines, inner)


def _changes(node: ast.expr) -> Iterator[str]:
    """Other texts of an expression."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        yield _text(node, op=SWAPS[type(node.op)]())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield _text(node, ops=[SWAPS[type(node.ops[0])]()])
        yield f"(not {ast.unparse(node)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield _text(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name in CALLS:
            other = {"attr" if isinstance(node.func, ast.Attribute) else "id": CALLS[name]}
            yield _text(node, func=type(node.func)(**{**vars(node.func), **other}))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield str(not node.value)
        elif isinstance(node.value, int | float):
            yield repr(node.value + 1) if isinstance(node.value, int) or node.value == 0 else repr(2 * node.value)


def _text(node: ast.expr, **changes: Any) -> str:
    return f"({ast.unparse(type(node)(**{**vars(node), **changes}))})"


def sample(n: int, seed: int) -> list[Mutant]:
    """Mutants drawn at random without replacement, of all files together."""
    files = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants(file)]
    order = np.random.default_rng(seed).permutation(len(every))
    return [every[place] for place in order[:n]]


class Order:
    """A plugin of pytest: which tests run, in which order; and what they took."""

    def __init__(self, wanted: Sequence[str] | None) -> None:
        self.place = None if wanted is None else {name: place for place, name in enumerate(wanted)}
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose and sort."""
        if self.place is not None:
            items[:] = sorted(
                (item for item in items if item.nodeid in self.place),
                key=lambda item: self.place[item.nodeid],  # type: ignore[index]
            )

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the time."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = report.nodeid


def run_tests(tests: Sequence[str] | None, *options: str) -> tuple[int, Order]:
    """The tests in this process, in the order given, until one fails."""
    order = Order(tests)
    quick = (
        "-x -q --tb=no --assert=plain -o addopts=--import-mode=importlib -p no:cacheprovider -p no:anyio -p no:xdist"
    )
    return int(pytest.main([*quick.split(), *options, *TESTS], plugins=[order])), order


def forked(function: Callable[[], tuple[int, Order]], shadow: Path) -> tuple[int, bytes]:
    """Exit status of tests in a process that has other packages loaded, but not ours; and what they took, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 3
        try:
            os.close(reader)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            for name in [name for name in sys.modules if name.partition(".")[0] in ("vbtta", "reproduction")]:
                del sys.modules[name]
            sys.path.insert(0, str(shadow))
            code, order = function()
            os.write(writer, json.dumps({"failed": order.failed, "seconds": order.seconds}).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    return os.waitpid(child, 0)[1], text


def baseline(work: Path) -> dict[str, Any]:
    """Seconds of every test, and the tests that reach each line: by coverage.py, once."""
    file = work / "baseline.json"
    if not file.exists():
        from coverage import CoverageData

        data_file = work / "coverage"
        os.environ["COVERAGE_FILE"] = str(data_file)
        options = ("--cov", "--cov-context=test", "--cov-report=", "--cov-fail-under=0")
        status, answer = forked(lambda: run_tests(None, *options), ROOT / "src")
        if status:
            sys.exit(f"the tests fail without a mutant: {answer.decode()}")
        data = CoverageData(str(data_file))
        data.read()
        reached: dict[str, dict[str, list[str]]] = {}
        for path in data.measured_files():
            if Path(path).is_relative_to(ROOT):
                contexts = data.contexts_by_lineno(path)
                reached[str(Path(path).relative_to(ROOT))] = {
                    str(line): sorted({name.partition("|")[0] for name in names}) for line, names in contexts.items()
                }
        with atomic_path(file) as temporary:
            temporary.write_text(
                json.dumps({"seconds": json.loads(answer)["seconds"], "reached": reached}), encoding="utf-8"
            )
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def tests_of(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Tests that reach a mutant, in order; all tests of a case share its fit, and reach what one of them does."""
    reached = known["reached"].get(mutant.file, {})
    if mutant.function:
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        names = {name for line in lines for name in reached.get(str(line), ())}
    else:
        names = {name for contexts in reached.values() for name in contexts}
    names.discard("")
    cases = {name.rpartition("[")[2] for name in names if "[" in name}
    seconds = known["seconds"]
    chosen, taken = [], Counter[str]()
    reaching = [name for name in seconds if name in names or name.rpartition("[")[2] in cases]
    for name in sorted(reaching, key=lambda name: (name not in names, seconds[name])):
        taken[name.partition("[")[0]] += 1
        if taken[name.partition("[")[0]] <= MOST_CASES or "golden" in name:
            chosen.append(name)
    return sorted(chosen, key=lambda name: ("golden" not in name, seconds[name]))


def judge(mutant: Mutant, tests: list[str], shadow: Path) -> tuple[str, str]:
    """Killed, survived or never reached; and the test that killed it. In a fork, which has all packages loaded."""
    if not tests:
        return "not reached", ""
    target = shadow / Path(mutant.file).relative_to("src")
    original = (ROOT / mutant.file).read_bytes()
    target.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
    status, answer = forked(lambda: run_tests(tests), shadow)
    target.write_bytes(original)
    if os.WIFSIGNALED(status):
        return "killed", "out of time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "crash"
    return (
        ("survived", "")
        if os.WEXITSTATUS(status) == 0
        else ("killed", json.loads(answer or "{}").get("failed") or "import")
    )


def run(n: int, seed: int, work: Path, minutes: float | None) -> list[dict[str, Any]]:
    """Verdicts on mutants, those of an earlier run included, until the time is up."""
    work.mkdir(parents=True, exist_ok=True)
    known = baseline(work)
    file, verdicts = work / f"mutants-{seed}.jsonl", []
    if file.exists():
        verdicts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    end = time.monotonic() + 60 * minutes if minutes else np.inf
    import hypothesis  # noqa: F401  loaded before the forks, as are those below
    import pyro  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        shadow = Path(folder) / "src"
        shutil.copytree(ROOT / "src", shadow)
        control = forked(lambda: run_tests(sorted(known["seconds"], key=known["seconds"].get)[:50]), shadow)
        if control[0]:
            sys.exit(f"tests fail without a mutant: {control[1].decode()}")
        for mutant in sample(n, seed)[len(verdicts) :]:
            if time.monotonic() > end:
                break
            tests = tests_of(mutant, known)
            verdict, by = judge(mutant, tests, shadow)
            source = (ROOT / mutant.file).read_bytes()
            verdicts.append({
                "file": mutant.file, "line": mutant.line, "function": mutant.function, "verdict": verdict, "by": by,
                "from": source[mutant.start : mutant.end].decode(), "to": mutant.text, "tests": len(tests),
            })  # fmt: skip
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(verdicts[-1]) + "\n")
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, judge, write the summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation")
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever is left")
    parser.add_argument("--out", help="folder of mutants.json; by default none is written")
    parser.add_argument("--work", default="runs/mutation", help="folder of finished mutants")
    options = parser.parse_args(arguments)
    verdicts = run(options.mutants, options.seed, Path(options.work), options.minutes)
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    if options.out:
        document = {"seed": options.seed, "counts": dict(counts), "provenance": provenance(), "mutants": verdicts}
        Path(options.out).mkdir(parents=True, exist_ok=True)
        with atomic_path(Path(options.out) / "mutants.json") as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
