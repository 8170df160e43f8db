"""Verdicts on made-up rows: what is said where the numbers are no evidence, turn back, or all agree."""

from typing import Any

import pytest

from reproduction import clouds, regression
from reproduction.extensions import METHODS
from reproduction.items import ITEMS
from reproduction.networks import STRATEGIES
from reproduction.records import Row, Verdict, judge
from reproduction.regression import SETS


def verdicts(name: str, rows: list[Row]) -> list[Verdict]:
    return judge(ITEMS[name].claims, rows)


def paths(**curves: list[float]) -> list[Row]:
    """Rows of figure 6; every strategy falls unless told otherwise."""
    falling = [3.0, 2.0, 1.0]
    return [
        {"strategy": name, "mae": curves.get(name, falling), "error_sd": falling, "synthetic": False, "seed": 0}
        for name in STRATEGIES
    ]


def test_figure6_says_where_the_error_turns() -> None:
    assert [claim.verdict for claim in verdicts("figure6", paths())] == ["holds", "holds"]
    error, _ = verdicts("figure6", paths(Mixup=[3.0, 1.0, 2.0]))
    assert error.verdict == "holds if only the ends are compared; the least is earlier for Mixup (step 2)"
    assert "least 1.000 at step 2" in error.numbers
    error, _ = verdicts("figure6", paths(Mixup=[3.0, 1.0, 4.0]))
    assert error.verdict.startswith("holds if the views are CutMix and Mixup + CutMix; the least is earlier for Mixup")


@pytest.mark.parametrize(
    ("saved", "verdict"),
    [
        ((0.002, -0.001), "does not hold: a gain within two standard errors of none is no evidence"),
        ((0.005, 0.006), "holds if a gain of 0.0055 nats counts"),
        ((0.05, 0.06), "holds"),
        ((-0.05, -0.06), "does not hold"),
    ],
)
def test_a_gain_within_its_error_is_no_evidence(saved: tuple[float, float], verdict: str) -> None:
    rows: list[Row] = []
    for seed, gain in enumerate(saved):
        for method in ("normal, ELBO", "normal, IWAE", "student-t, ELBO", "laplace, ELBO"):
            nll = 1.0 if method == "normal, ELBO" else 1.0 - gain
            rows.append({"part": "inference", "method": f"ADVI, {method}", "seed": seed, "nll": nll, "bound": -1.0})
        rows += [{"part": "shift", "method": method, "strength": 1, "accuracy": 0.5} for method in METHODS[1:]]
    verdict_of = {words.partition(":")[2].split()[0]: verdict for words, verdict, _ in verdicts("extensions", rows)}
    assert verdict_of["tighter"] == verdict_of["components"] == verdict


def test_tables_2_and_3_judge_against_no_augmentation() -> None:
    def row(views: str, **more: Any) -> Row:
        return {"views": views, "draws": 4, "fitted_on": "out-of-fold", "reading": "inductive", **more}

    def rows(errors: dict[str, float]) -> list[Row]:
        table: list[Row] = [{"method": "network", "reading": "inductive", "mse_1": 0.5}]
        for views, error in errors.items():
            table.append(row(views, method="uniform", mse_1=0.9))
            table.append(row(views, method="vb", engine="em", mse_1=0.8, mse_9=error))
        return table

    def against_the_network(rows: list[Row]) -> Verdict:
        return judge(ITEMS["table2"].claims[-1:], rows)[0]

    verdict = against_the_network(rows({"mixup": 0.55, "cutmix": 0.4, "mixup + cutmix": 0.3}))
    assert verdict.verdict == "holds if the views are not mixup alone, which no augmentation beats"
    assert "no augmentation 0.5000" in verdict.numbers
    assert against_the_network(rows(dict.fromkeys(SETS, 0.4))).verdict == "holds"
    assert against_the_network(rows(dict.fromkeys(SETS, 0.6))).verdict == "does not hold"
    where = {"draws": 4, "fitted_on": "out-of-fold", "reading": "inductive"}
    block = regression._block(rows(dict.fromkeys(SETS, 0.4)), where, "em")
    assert "| no augmentation | 0.500 (± 0.000) | - | - |" in block


def test_equal_ends_are_one_percentage() -> None:
    assert clouds._percentages([1.0, 0.999, 1.0]) == "100 %"
    assert clouds._percentages([0.5, 1.0]) == "between 50 and 100 % (on average 75 %)"
