"""Where mixup and cutmix send a fixed input of the plane, and whether that is Gaussian (figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reproduction.artificial import draw_inputs, mean_and_sd
from reproduction.records import PROFILES, Claim, Item, Places, Row, Rows
from reproduction.tallies import markdown_table, number, numbers, partly, select, spread
from vbtta.augment import CutMix, Mixup, Pool, RowStreams
from vbtta.diagnostics import henze_zirkler, normality_of
from vbtta.plotting import COLOURS, styled

Array = NDArray[np.float64]
_VIEWS = ("mixup", "cutmix")
_LEVEL = 0.05


@dataclass(frozen=True)
class Config:
    """Choices of a profile."""

    distribution: str  # of the training inputs, two coordinates: gaussian, N(0, 1), or gamma, Gamma(2, 2)
    pool: int = 10_000  # training inputs
    distances: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0)  # of the fixed inputs from the mean, in standard deviations
    alphas: tuple[float, ...] = (0.1, 0.5, 0.9)  # strengths of the views
    draws: int = 200  # points in a sample that is tested
    repeats: int = 100  # samples
    shown: int = 500  # points of a cloud that the figure shows
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """One fixed input and one strength."""

    distribution: str
    pool: int
    distance: float
    alpha: float
    draws: int
    repeats: int
    shown: int
    seed: int


def _trials(config: Config) -> list[Trial]:
    """One trial for every input and strength."""
    shared = {name: getattr(config, name) for name in ("distribution", "pool", "draws", "repeats", "shown", "seed")}
    return [Trial(**shared, distance=distance, alpha=alpha) for alpha in config.alphas for distance in config.distances]


def _run_trial(trial: Trial, places: Places) -> list[Row]:
    """Draw both views of the input many times, test the draws, and keep some of them for the figure."""
    rng = np.random.default_rng([trial.seed, trial.pool])
    pool = Pool(draw_inputs(trial.distribution, rng, trial.pool, 2))
    mean, sd = mean_and_sd(trial.distribution)
    point = np.full(2, mean + trial.distance * sd / np.sqrt(2))
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


def _table(rows: Rows, config: Config) -> str:
    """Shares of samples that fail the tests, and moments that would be 0 for a Gaussian."""
    inputs = "N(0, I)" if config.distribution == "gaussian" else "Gamma(2, 2)"
    columns = {
        "alpha": ("alpha", "g"),
        "distance": ("distance", "g"),
        "statistic": ("departure", ".1f"),
        "Henze-Zirkler": ("henze_zirkler", ".2f"),
        "Anderson-Darling": ("anderson_darling", ".2f"),
        "Shapiro-Wilk": ("shapiro_wilk", ".2f"),
        "skewness": ("skewness", ".2f"),
        "excess kurtosis": ("excess_kurtosis", ".2f"),
    }
    body = [[str(row["view"]), *(f"{number(row, key):{form}}" for key, form in columns.values())] for row in rows]
    return (
        f"Points made of one fixed input by mixup and cutmix with {config.pool:,} training inputs from {inputs} in the "
        f"plane. *Distance*: of the input from the mean, in standard deviations. "
        "*Statistic*: Henze and Zirkler's, a distance from the Gaussian, about 1 or less for Gaussian points. "
        f"*Tests*: share of {config.repeats} "
        f"samples of {config.draws} points that are not Gaussian at level {_LEVEL:g}, which is about {_LEVEL:g} for "
        "Gaussian points; the univariate tests look at both coordinates, Holm-corrected. *Skewness, excess kurtosis*: "
        "Mardia's, 0 for a Gaussian. The paper shows pictures for an unstated alpha and no tests.\n\n"
        + markdown_table(["view", *columns], body)
    )


def _ends(rows: Rows) -> list[tuple[Row, Row]]:
    """Mixup's rows at the least and at the largest distance, by strength."""
    mixup, reach = select(rows, view="mixup"), [number(row, "distance") for row in rows]
    near, far = select(mixup, distance=min(reach)), select(mixup, distance=max(reach))
    return [(first, last) for first in near for last in far if first["alpha"] == last["alpha"]]


def _rejected(rows: Rows, **wanted: object) -> list[float]:
    return [number(row, "henze_zirkler") for row in select(rows, **wanted)]


def _rejected_at_the_mean(rows: Rows) -> float:
    return spread([near for near, _ in _ends(rows)], "henze_zirkler").mean


def _statistics_at_the_ends(rows: Rows) -> str:
    near, far = _ends(rows)[0]
    pairs = ", ".join(
        f"{number(near, 'departure'):.1f} and {number(far, 'departure'):.1f} (alpha {near['alpha']:g})"
        for near, far in _ends(rows)
    )
    return f"Henze-Zirkler statistic at {near['distance']:g} and {far['distance']:g} standard deviations: {pairs}"


_CLAIMS = (
    Claim(
        "Mixup's points are close to Gaussian for inputs near the mean of the data",
        lambda rows: _rejected_at_the_mean(rows) <= 2 * _LEVEL,
        lambda rows: (
            f"at the mean {100 * _rejected_at_the_mean(rows):.0f} % of samples are rejected; excess kurtosis "
            + ", ".join(f"{number(row, 'excess_kurtosis'):.1f} (alpha {row['alpha']:g})" for row, _ in _ends(rows))
        ),
    ),
    Claim(
        "The further the input lies in the tail, the further mixup's points are from Gaussian",
        lambda rows: partly(
            {f"{near['alpha']:g}": number(far, "departure") > number(near, "departure") for near, far in _ends(rows)},
            "holds if alpha is {passed}",
            " or ",
        ),
        _statistics_at_the_ends,
    ),
    Claim(
        "Cutmix's points are close to Gaussian wherever the input is",
        lambda rows: max(_rejected(rows, view="cutmix")) <= 2 * _LEVEL,
        lambda rows: f"{_percentages(_rejected(rows, view='cutmix'))} of samples are rejected",
    ),
    Claim(
        "Statistical hypothesis tests confirm the Gaussian assumption (announced, not shown)",
        lambda rows: max(_rejected(rows)) <= 2 * _LEVEL,
        lambda rows: f"Henze-Zirkler rejects {_percentages(_rejected(rows))} of samples",
    ),
)


def _percentages(shares: Sequence[float]) -> str:
    """The range of shares, or the percentage that all of them round to."""
    low, mean, high = (f"{100 * share:.0f}" for share in (min(shares), float(np.mean(shares)), max(shares)))
    return f"{high} %" if low == high else f"between {low} and {high} % (on average {mean} %)"


@styled()
def _draw(rows: Rows) -> Any:
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
        axes.plot(*[[value] for value in numbers(row, "point")], "o", color="#010101", markersize=5)
        axes.set_aspect("equal")
        if line == 0:
            axes.set_title(f"{distances[column]:g} sd from the mean", fontsize=9)
        if column == 0:
            axes.set_ylabel(f"{row['view']}({row['alpha']:g})")
    return figure


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
    covariance = np.reshape(numbers(row, "covariance"), (2, 2))
    angle = np.linspace(0, 2 * np.pi, 100)
    circle = np.linalg.cholesky(covariance) @ np.stack([np.cos(angle), np.sin(angle)])
    centre = np.array(numbers(row, "mean"))[:, None]
    for reach in (1, 2):
        axes.plot(*(centre + reach * circle), color="#010101", linewidth=0.8, linestyle=(0, (4, 3)))


def item(name: str, distribution: str, data: str) -> Item[Config, Trial]:
    """Figure 3 or 4."""
    small = Config(distribution, pool=500, distances=(0.0, 2.0), alphas=(0.5,), draws=100, repeats=20, shown=100)
    return Item(
        f"Points made by mixup and cutmix around fixed inputs, {data}",
        1,
        {profile: small if profile == "smoke" else Config(distribution) for profile in PROFILES},
        _trials,
        _run_trial,
        _table,
        _CLAIMS,
        figures=lambda rows: {name: _draw(rows)},
    )
