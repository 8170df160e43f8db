"""Where mixup and cutmix send a fixed input of the plane, and whether that is Gaussian (figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbtta._support.random import RowStreams
from vbtta.augment.mixing import CutMix, Mixup, Pool
from vbtta.diagnostics.normality import henze_zirkler, normality_of
from vbtta.experiments.distributions import draw_inputs, mean_and_sd
from vbtta.experiments.item import Cell, Claim, Places, Row
from vbtta.experiments.report import markdown_table
from vbtta.experiments.tallies import number, select, spread
from vbtta.plotting import COLOURS, styled

__all__ = ["CloudConfig", "CloudTrial", "claims", "cloud_trials", "draw_clouds", "no_cells", "run_cloud", "table"]

Array = NDArray[np.float64]
_VIEWS = ("mixup", "cutmix")
_LEVEL = 0.05


@dataclass(frozen=True)
class CloudConfig:
    """Choices of a profile.

    Parameters
    ----------
    distribution : {"gaussian", "gamma"}
        Of the training inputs, two independent coordinates: N(0, 1) or Gamma(2, 2), shape and rate.
    pool : int
        Training inputs.
    distances : floats
        Of the fixed inputs from the mean, in standard deviations, along the diagonal.
    alphas : floats
        Strengths of the views.
    draws, repeats : int
        Points in one sample that is tested, and samples.
    shown : int
        Points of a cloud that the figure shows.
    seed : int
    """

    distribution: str
    pool: int = 10_000
    distances: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0)
    alphas: tuple[float, ...] = (0.1, 0.5, 0.9)
    draws: int = 200
    repeats: int = 100
    shown: int = 500
    seed: int = 0


@dataclass(frozen=True)
class CloudTrial:
    """One fixed input and one strength."""

    distribution: str
    pool: int
    distance: float
    alpha: float
    draws: int
    repeats: int
    shown: int
    seed: int


def cloud_trials(config: CloudConfig) -> list[CloudTrial]:
    """One trial for every input and strength."""
    return [
        CloudTrial(
            config.distribution,
            config.pool,
            distance,
            alpha,
            config.draws,
            config.repeats,
            config.shown,
            config.seed,
        )
        for alpha in config.alphas
        for distance in config.distances
    ]


def run_cloud(trial: CloudTrial, places: Places) -> list[Row]:
    """Draw both views of the input many times, test the draws, and keep some of them for the figure."""
    rng = np.random.default_rng([trial.seed, trial.pool])
    pool = Pool(draw_inputs(trial.distribution, rng, trial.pool, 2))
    mean, spread = mean_and_sd(trial.distribution)
    point = np.full(2, mean + trial.distance * spread / np.sqrt(2))
    n_points = trial.draws * trial.repeats
    rows: list[Row] = []
    for name, kind in zip(_VIEWS, (Mixup, CutMix), strict=True):
        view = kind(trial.alpha, pool)
        streams = RowStreams(trial.seed, view.name, 0, range(n_points))
        points = np.asarray(view(np.tile(point, (n_points, 1)), streams))  # (draws * repeats, 2)
        samples = points.reshape(trial.repeats, 1, trial.draws, 2)
        tests = normality_of(samples, [view.name], level=_LEVEL)
        skewness, kurtosis = _mardia(points)
        statistics = [henze_zirkler(sample[0]).statistic for sample in samples]
        shown = points[: trial.shown].round(4)
        rows.append(
            {
                "distribution": trial.distribution,
                "view": name,
                "alpha": trial.alpha,
                "distance": trial.distance,
                "departure": float(np.mean(statistics)),
                "henze_zirkler": float(tests.henze_zirkler[0]),
                "anderson_darling": float(tests.anderson_darling[0]),
                "shapiro_wilk": float(tests.shapiro_wilk[0]),
                "skewness": skewness,
                "excess_kurtosis": kurtosis,
                "point": point.tolist(),
                "mean": points.mean(axis=0).tolist(),
                "covariance": np.cov(points.T).ravel().tolist(),
                "first": shown[:, 0].tolist(),
                "second": shown[:, 1].tolist(),
            }
        )
    return rows


def table(rows: Sequence[Row], config: CloudConfig) -> str:
    """Shares of samples that fail the tests, and moments that would be 0 for a Gaussian."""
    inputs = "N(0, I)" if config.distribution == "gaussian" else "Gamma(2, 2)"
    header = [
        "view",
        "alpha",
        "distance",
        "statistic",
        "Henze-Zirkler",
        "Anderson-Darling",
        "Shapiro-Wilk",
        "skewness",
        "excess kurtosis",
    ]
    body = [
        [
            str(row["view"]),
            f"{row['alpha']:g}",
            f"{row['distance']:g}",
            f"{number(row, 'departure'):.1f}",
            *(f"{number(row, test):.2f}" for test in ("henze_zirkler", "anderson_darling", "shapiro_wilk")),
            f"{number(row, 'skewness'):.2f}",
            f"{number(row, 'excess_kurtosis'):.2f}",
        ]
        for row in rows
    ]
    return (
        f"Points made of one fixed input by mixup and cutmix with {config.pool:,} training inputs from {inputs} in the "
        f"plane. *Distance*: of the input from the mean, in standard deviations. "
        "*Statistic*: Henze and Zirkler's, a distance from the Gaussian, about 1 or less for Gaussian points. "
        f"*Tests*: share of {config.repeats} "
        f"samples of {config.draws} points that are not Gaussian at level {_LEVEL:g}, which is about {_LEVEL:g} for "
        "Gaussian points; the univariate tests look at both coordinates, Holm-corrected. *Skewness, excess kurtosis*: "
        "Mardia's, 0 for a Gaussian. The paper shows pictures for an unstated alpha and no tests.\n\n"
        + markdown_table(header, body)
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What the paper reads from its pictures."""
    mixup, cutmix = select(rows, view="mixup"), select(rows, view="cutmix")
    reach = sorted({number(row, "distance") for row in rows})
    near, far = select(mixup, distance=reach[0]), select(mixup, distance=reach[-1])
    tests_near = spread(near, "henze_zirkler").mean
    gaussian = tests_near <= 2 * _LEVEL
    by_alpha = [(one, other) for one in near for other in far if one["alpha"] == other["alpha"]]
    further = [number(other, "departure") > number(one, "departure") for one, other in by_alpha]
    rejected = [number(row, "henze_zirkler") for row in rows]
    cutmix_rejected = [number(row, "henze_zirkler") for row in cutmix]
    most = max(cutmix_rejected)
    return [
        Claim(
            "Mixup's points are close to Gaussian for inputs near the mean of the data",
            "holds" if gaussian else "does not hold",
            f"at the mean {100 * tests_near:.0f} % of samples are rejected; excess kurtosis "
            + ", ".join(f"{number(row, 'excess_kurtosis'):.1f} (alpha {row['alpha']:g})" for row in near),
        ),
        Claim(
            "The further the input lies in the tail, the further mixup's points are from Gaussian",
            "holds"
            if all(further)
            else f"holds if {_strengths(by_alpha, further)}"
            if any(further)
            else "does not hold",
            f"Henze-Zirkler statistic at {reach[0]:g} and {reach[-1]:g} standard deviations: "
            + ", ".join(
                f"{number(one, 'departure'):.1f} and {number(other, 'departure'):.1f} (alpha {one['alpha']:g})"
                for one, other in by_alpha
            ),
        ),
        Claim(
            "Cutmix's points are close to Gaussian wherever the input is",
            "holds" if most <= 2 * _LEVEL else "does not hold",
            f"{_percentages(cutmix_rejected)} of samples are rejected",
        ),
        Claim(
            "Statistical hypothesis tests confirm the Gaussian assumption (announced, not shown)",
            "holds" if max(rejected) <= 2 * _LEVEL else "does not hold",
            f"Henze-Zirkler rejects {_percentages(rejected)} of samples",
        ),
    ]


def _percentages(shares: Sequence[float]) -> str:
    """The range of shares, or the one percentage that all of them are."""
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    mean = f"{100 * float(np.mean(shares)):.0f}"
    return f"{high} %" if low == high else f"between {low} and {high} % (on average {mean} %)"


@styled
def draw_clouds(rows: Sequence[Row]) -> Any:
    """Both views (rows of panels) of every input (columns) at the middle strength, with the ellipses of a Gaussian."""
    from matplotlib.figure import Figure

    alphas = sorted({number(row, "alpha") for row in rows})
    chosen = [row for row in rows if row["alpha"] == alphas[len(alphas) // 2]]
    distances = sorted({number(row, "distance") for row in chosen})
    figure = Figure(figsize=(2.1 * len(distances), 4.4), layout="constrained")
    panels = figure.subplots(2, len(distances), sharex=True, sharey=True, squeeze=False)
    for row in chosen:
        line, column = _VIEWS.index(str(row["view"])), distances.index(number(row, "distance"))
        axes = panels[line, column]
        axes.plot(row["first"], row["second"], ".", color=COLOURS[line], markersize=2, alpha=0.5, rasterized=False)
        _ellipses(axes, row)
        axes.plot(*[[value] for value in _list(row, "point")], "o", color="#010101", markersize=5)
        axes.set_aspect("equal")
        if line == 0:
            axes.set_title(f"{distances[column]:g} sd from the mean", fontsize=9)
        if column == 0:
            axes.set_ylabel(f"{row['view']}({row['alpha']:g})")
    return figure


def no_cells(rows: Sequence[Row]) -> list[Cell]:
    """The paper prints no numbers here."""
    return []


def _mardia(points: Array) -> tuple[float, float]:
    """Mardia's skewness and excess kurtosis (n, d): 0 for a Gaussian.

    With z the whitened points, skewness is the squared length of the third moments, sum_abc E[z_a z_b z_c]^2.
    """
    centred = points - points.mean(axis=0)
    factor = np.linalg.cholesky(centred.T @ centred / len(points))
    white = np.linalg.solve(factor, centred.T).T  # (n, d)
    third = np.einsum("na,nb,nc->abc", white, white, white) / len(points)
    d = points.shape[1]
    return float((third**2).sum()), float(((white**2).sum(axis=1) ** 2).mean() - d * (d + 2))


def _ellipses(axes: Any, row: Row) -> None:
    covariance = np.reshape(_list(row, "covariance"), (2, 2))
    angle = np.linspace(0, 2 * np.pi, 100)
    circle = np.linalg.cholesky(covariance) @ np.stack([np.cos(angle), np.sin(angle)])
    centre = np.array(_list(row, "mean"))[:, None]
    for reach in (1, 2):
        axes.plot(*(centre + reach * circle), color="#010101", linewidth=0.8, linestyle=(0, (4, 3)))


def _strengths(pairs: Sequence[tuple[Row, Row]], wanted: Sequence[bool]) -> str:
    chosen = [f"{pair[0]['alpha']:g}" for pair, yes in zip(pairs, wanted, strict=True) if yes]
    return f"alpha is {' or '.join(chosen)}"


def _list(row: Row, key: str) -> list[float]:
    value = row[key]
    assert isinstance(value, list)
    return value
