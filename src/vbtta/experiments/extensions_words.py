"""The extensions in words: tables, a figure, and what the paper hopes for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vbtta.experiments.corruptions import CORRUPTIONS
from vbtta.experiments.image_setups import ImageSetup
from vbtta.experiments.item import Claim, Row
from vbtta.experiments.report import markdown_table
from vbtta.experiments.tallies import Difference, paired, plural, select, spread
from vbtta.plotting import COLOURS, styled

__all__ = ["METHODS", "claims", "shift_figure", "table"]

METHODS = (
    "identity",
    "uniform",
    "weights of clean images",
    "weights of shifted images",
    "weights without labels",
)


def table(rows: Sequence[Row], steps: int, n_shift: int, inference: ImageSetup, shift: ImageSetup) -> str:
    """Markdown: components and bounds, then corruptions."""
    found = select(rows, part="inference")
    body = []
    for method in dict.fromkeys(str(row["method"]) for row in found):
        chosen = select(found, method=method)
        numbers = [spread(chosen, key).text() for key in ("mae", "nll", "crps", "bound", "from_em")]
        body.append([method, *numbers, f"{sum(row['converged'] is True for row in chosen)} of {len(chosen)}"])
    heads = ["", "MAE", "NLL", "CRPS", "bound a label", "largest difference to EM's weights", "converged"]
    first = markdown_table(heads, body)
    shifted = select(rows, part="shift")
    lines = []
    for kind, strength in dict.fromkeys((row["corruption"], row["strength"]) for row in shifted):
        here = select(shifted, corruption=kind, strength=strength)
        cells = [_pair(select(here, method=method)) for method in METHODS]
        lines.append([f"{kind} {strength}" if strength else "none", *cells])
    second = markdown_table(["corruption", *METHODS], lines)
    n_seeds = len({row["seed"] for row in rows})
    made_up = " Made-up images stand in for both data sets." if rows[0]["synthetic"] else ""
    return (
        f"## Components and bounds on UTKFace\n\n{first}\n\nThe identity and the paper's six views, weights fitted on "
        f"{inference.sample.n_calibration} held-out faces with two labels each; {steps} steps of ADVI with 8 draws, a "
        f"Dirichlet prior of concentration 1 throughout; {plural(n_seeds, 'seed')}.{made_up} The bound of EM counts "
        "parameters by their factorised posterior, ADVI's by a full-rank normal one. The same networks as in "
        "table 4, with what that table says of their size.\n\n"
        f"## Weights under distribution shift on CIFAR-10\n\n{second}\n\n"
        f"Accuracy / NLL, means over {plural(n_seeds, 'seed')}, up to {n_shift} test images, "
        f"corrupted here: {_strengths()}. Eight views that draw nothing at random. "
        "Weights are fitted on clean calibration images and their three human labels, on calibration images corrupted "
        "in the same way and the same labels (which knows the shift), or on the corrupted test images without any "
        f"label ({steps // 2} steps of ADVI). The mixtures fitted with labels have temperatures and a model of the "
        "annotators' errors; the one without labels only weights."
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The three items of the paper's future work."""
    inference, shift = select(rows, part="inference"), select(rows, part="shift")
    normal = select(inference, method="ADVI, normal, ELBO")
    heavy = paired(normal, select(inference, method="ADVI, student-t, ELBO"), "nll")
    pointed = paired(normal, select(inference, method="ADVI, laplace, ELBO"), "nll")
    tighter = paired(select(inference, method="ADVI, normal, IWAE"), normal, "bound")
    better = paired(normal, select(inference, method="ADVI, normal, IWAE"), "nll")
    moved = [row for row in shift if row["strength"] != 0]
    versus = {
        method: paired(select(moved, method=method), select(moved, method="uniform"), "accuracy")
        for method in METHODS[2:]
    }
    knowing = paired(
        select(moved, method="weights of shifted images"), select(moved, method="weights of clean images"), "accuracy"
    )
    unlabelled = versus["weights without labels"]
    return [
        Claim(
            "Future work: components other than the Gaussian may fit better",
            _small(heavy),
            f"test NLL saved on UTKFace by Student-t components {heavy.text()}, by Laplace components {pointed.text()}",
        ),
        Claim(
            "Future work: tighter bounds could improve the optimisation",
            _small(better),
            f"the importance-weighted bound is higher than the ELBO by {tighter.text()} nats a label; test NLL saved "
            f"{better.text()}",
        ),
        Claim(
            "Future work: the weights may help under distribution shift",
            _shifted(versus["weights of clean images"], versus["weights of shifted images"]),
            "accuracy gained over uniform weights, on nine corruptions and all seeds (their standard errors take the "
            "corruptions of a seed for independent): "
            + "; ".join(f"{method} {gap.text()}" for method, gap in versus.items()),
        ),
        Claim(
            "Not in the paper: weights should be fitted to the shifted images",
            _verdict(knowing),
            f"accuracy gained over weights of clean images {knowing.text()}",
        ),
        Claim(
            "Not in the paper: weights inferred without labels are as good as uniform ones",
            "holds" if unlabelled.mean > -2 * unlabelled.error else "does not hold",
            f"accuracy gained over uniform weights {unlabelled.text()}",
        ),
    ]


@styled
def shift_figure(rows: Sequence[Row]) -> Any:
    """Accuracy against strength, one panel a corruption, strength 0 for clean images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    shift = select(rows, part="shift")
    for axes, kind in zip(figure.subplots(1, len(CORRUPTIONS), sharey=True), CORRUPTIONS, strict=True):
        for colour, method in zip(COLOURS, METHODS, strict=False):
            chosen = [select(shift, corruption="none", strength=0, method=method)]
            chosen += [select(shift, corruption=kind, strength=strength, method=method) for strength in (1, 2, 3)]
            axes.plot(range(4), [spread(part, "accuracy").mean for part in chosen], "o-", color=colour, markersize=3)
        axes.set_xticks(range(4))
        axes.set_xlabel(f"{kind}, strength")
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("accuracy")
    handles = figure.axes[0].get_lines()
    figure.legend(handles, METHODS, loc="outside lower center", ncols=3)
    return figure


def _pair(rows: Sequence[Row]) -> str:
    return f"{spread(rows, 'accuracy').mean:.3f} / {spread(rows, 'nll').mean:.3f}"


def _strengths() -> str:
    meaning = {"noise": "standard deviation", "blur": "standard deviation in pixels", "contrast": "factor"}
    return ", ".join(f"{kind} ({meaning[kind]} {', '.join(map(str, CORRUPTIONS[kind]))})" for kind in CORRUPTIONS)


def _small(gap: Difference, least: float = 0.01) -> str:
    """A verdict on nats of log loss, where next to nothing, or nothing sure, is said to be just that."""
    if gap.mean <= 0:
        return "does not hold"
    if gap.mean <= 2 * gap.error:
        return "does not hold: a gain within two standard errors of none is no evidence"
    return "holds" if gap.mean >= least else f"holds if a gain of {gap.mean:.4f} nats counts"


def _shifted(clean: Difference, knowing: Difference) -> str:
    """Whether weights help under a shift: those of clean images, or only those that know the shift."""
    if clean.mean > 2 * clean.error:
        return "holds"
    if knowing.mean > 2 * knowing.error:
        return "holds if the weights are fitted on labelled images with the same shift"
    return "does not hold"


def _verdict(gap: Difference) -> str:
    if gap.mean > 2 * gap.error:
        return "holds"
    return "holds if a difference of less than two standard errors counts" if gap.mean > 0 else "does not hold"
