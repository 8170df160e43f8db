"""Run benchmarks: python -m benchmarks [names] --out results/bench [--quick]; one JSON file each."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from reproduction.provenance import provenance
from vbtta._support.files import atomic_path

_ON_REQUEST = ("quality", "cifar10n", "dense")  # need trained networks and have commands of their own


def benchmarks() -> list[str]:
    """Names of the modules here that have a function `run`, without importing them."""
    names = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
            names.append(path.stem)
    return names


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """The outcome of one benchmark and where it comes from."""
    made = provenance()
    load = os.getloadavg() if hasattr(os, "getloadavg") else (0.0,)
    start = time.perf_counter()
    outcome = import_module(f"benchmarks.{name}").run(quick=quick)
    seconds = time.perf_counter() - start
    circumstances = {"quick": quick, "seconds": seconds, "cores": os.cpu_count(), "load_before": load[0]}
    return {"benchmark": name, "outcome": outcome, "circumstances": circumstances, "provenance": made}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"which of {', '.join(known)}; by default all but {', '.join(_ON_REQUEST)}"
    )
    parser.add_argument("--out", default="results/bench", help="folder of the JSON files")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs, not how fast it is")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; there are {', '.join(known)}")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or [name for name in known if name not in _ON_REQUEST]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        result = measure(name, quick=options.quick)
        with atomic_path(folder / f"{name}.json") as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {result['circumstances']['seconds']:.0f} s -> {folder / name}.json", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
