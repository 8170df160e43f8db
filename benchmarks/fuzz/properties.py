"""Hypothesis: JSON documents and nested values of any shape for readers and constructors, shrunk where they fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from benchmarks.fuzz.base import ALLOWED, Family, Rng, check, check_finite
from vbtta import LabelSets, Policy, ViewPredictions
from vbtta.augment import load_views
from vbtta.data.files import read_table, write_table

_EXAMPLES = 20  # of one case
_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_nested = st.recursive(_plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))
_headed = st.dictionaries(st.sampled_from(["task", "views", "weights", "model", "posterior", "n_outputs"]), _nested)


def _property(strategy: Any, call: Callable[[Any, Path], object]) -> Callable[[Rng, Path], str]:
    def case(rng: Rng, folder: Path) -> str:
        @hypothesis.seed(int(rng.integers(2**31)))
        @hypothesis.settings(max_examples=_EXAMPLES, database=None, deadline=None,
                             suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
        @hypothesis.given(strategy)
        def attack(value: Any) -> None:
            try:
                call(value, folder)
            except ALLOWED as error:
                check("\n" not in str(error), f"a message of several lines: {error}")

        attack()
        return f"{_EXAMPLES} examples"

    return case


def _labels(value: Any, folder: Path) -> None:
    labels = LabelSets.from_array(value)
    check_finite("labels", labels.value, labels.count)


def _columns(value: Any, folder: Path) -> None:
    labels = LabelSets.from_table({"instance": list(range(len(value))), "label": value})
    check_finite("labels", labels.value, labels.count)


def _predictions(value: Any, folder: Path) -> None:
    check_finite("outputs", ViewPredictions(value).outputs)


def _policy(value: Any, folder: Path) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps({"format": "vbtta-policy", "version": 1, **value}), encoding="utf-8")
    Policy.load(path, verify=False)


def _views(value: Any, folder: Path) -> None:
    path = folder / "views.json"
    path.write_text(json.dumps({"views": value}), encoding="utf-8")
    load_views(path)


def _cells(value: list[str], folder: Path) -> None:
    import numpy as np

    write_table(folder / "cells.csv", {"a": np.array([*value, "word"])})
    cells = read_table(folder / "cells.csv")["a"].tolist()
    assert cells == [*value, "word"], (cells, value)


_text = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=6)
_cell = _text.filter(lambda text: bool(text.strip()))
FAMILIES = (
    Family("hypothesis: labels", _property(_nested, _labels), 0.0005),
    Family("hypothesis: columns", _property(st.lists(_plain, max_size=6), _columns), 0.0005),
    Family("hypothesis: predictions", _property(_nested, _predictions), 0.0005),
    Family("hypothesis: policies", _property(_headed, _policy), 0.0005),
    Family("hypothesis: views", _property(_nested, _views), 0.0005),
    Family("hypothesis: cells", _property(st.lists(_cell, max_size=5), _cells), 0.0005),
)
