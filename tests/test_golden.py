"""The answers of some forty small problems are those of tests/golden.json; tests/golden.py says what they are.

A change that is meant to alter numbers regenerates the file in a commit of its own, with the reason.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from golden import PATH, PROBLEMS, GoldenProblem, answers

GOLDEN: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may be from the file's, as a share of its largest entry, or of one where all are smaller.

    Attributes
    ----------
    share : float
    spreads : float
        Standard deviations over seeds on top of that.
    """

    share: float
    spreads: float = 0.0


TOLERANCES = {
    "exact": Tolerance(1e-9),  # plain EM at its fixed point
    "accelerated": Tolerance(1e-6),  # stops where the bound gains 1e-13 a label: parameters are good to its root
    "default": Tolerance(1e-3),  # tol=1e-7 for the fit, 1e-6 for the folds
    # A run ends at a random place around the optimum, and 1024 draws estimate its bound. The spread over six seeds
    # measures both; six samples may understate it by half, and a run is one more sample.
    "sampled": Tolerance(0.005, spreads=6.0),
}
CONFUSION = Tolerance(1e-7)  # a line search compares bounds whose rounding depends on the processor
INNER_FIT = Tolerance(1e-3)  # intervals of a Gaussian mixture come from a further fit, which stops at 1e-6


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_answers_are_those_of_the_file(problem: GoldenProblem) -> None:
    if problem.kind == "sampled":
        pytest.importorskip("pyro", reason="ADVI needs the extra advi")
    record = GOLDEN[problem.name]
    policy, data = problem.fit()
    assert (problem.kind, type(policy.model).__name__) == (record["kind"], record["model"])
    values = answers(policy, data)
    if problem.kind != "sampled":  # of a sampled bound only the total is kept
        assert set(values) == set(record["answers"])
    for name, expected in record["answers"].items():
        inner = name == "weight_interval" and record["model"] == "GaussianMixture" and problem.kind != "sampled"
        noisy = problem.kind == "exact" and getattr(problem.model, "noise", None) == "confusion"
        tolerance = INNER_FIT if inner else CONFUSION if noisy else TOLERANCES[problem.kind]
        limit = np.asarray(tolerance.share * max(1.0, np.abs(expected).max()))
        if tolerance.spreads:
            limit = limit + tolerance.spreads * np.asarray(record["spread"][name])
        error = np.abs(np.subtract(values[name], expected))
        assert (error <= limit).all(), f"{name}: {values[name]} instead of {expected}, beyond {limit}"


def test_the_file_has_these_problems_and_no_others() -> None:
    assert set(GOLDEN) == {problem.name for problem in PROBLEMS}
    assert len(PROBLEMS) == len(GOLDEN)
