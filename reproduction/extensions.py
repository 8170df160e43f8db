"""What the paper leaves to future work: other components, tighter bounds, and weights under a shifted distribution."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from reproduction.networks import SETUPS, STRATEGIES, ImageSetup, paper_views, trained_network
from reproduction.records import Claim, Item, Places, Row, Rows
from reproduction.scoring import mean_crps, round_list, scores, uniform
from reproduction.tallies import Difference, markdown_table, paired, plural, select, spread
from vbtta import ADVI, EM, CategoricalMixture, ConvergenceWarning, GaussianMixture, Policy, ViewPredictions, fit_policy
from vbtta.augment import Augmentation, Blur, Contrast, Gamma, HorizontalFlip, Identity, Rotate, Zoom
from vbtta.plotting import COLOURS, styled

Kind = Literal["inference", "shift"]
# What the strengths 1, 2 and 3 mean, for pixels in [0, 1].
CORRUPTIONS: dict[str, tuple[float, float, float]] = {
    "noise": (0.04, 0.08, 0.12),  # standard deviation
    "blur": (0.6, 0.9, 1.3),  # standard deviation of the Gaussian, pixels
    "contrast": (0.5, 0.3, 0.15),  # what distances from the image's mean are multiplied by
}
METHODS = (
    "identity",
    "uniform",
    "weights of clean images",
    "weights of shifted images",
    "weights without labels",
)


@dataclass(frozen=True)
class Trial:
    """One seed of one of the two parts."""

    kind: Kind  # components and bounds on UTKFace, or corrupted CIFAR-10 images
    setup: ImageSetup  # sample and network, shared with table 4
    advi_steps: int
    n_shift: int  # calibration and test images that are corrupted, at most


@dataclass(frozen=True)
class Config:
    """Seeds and sizes."""

    seeds: tuple[int, ...]
    inference: ImageSetup
    shift: ImageSetup
    advi_steps: int
    n_shift: int


def _trials(config: Config) -> list[Trial]:
    """Both parts for every seed."""
    setups: dict[Kind, ImageSetup] = {"inference": config.inference, "shift": config.shift}
    return [
        Trial(kind, setup.at(seed), config.advi_steps, config.n_shift)
        for seed in config.seeds
        for kind, setup in setups.items()
    ]


def _run_trial(trial: Trial, places: Places) -> list[Row]:
    """Rows of one part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # rows say whether a fit converged
        rows = _inference(trial, places) if trial.kind == "inference" else _shift(trial, places)
    base: Row = {"part": trial.kind, "seed": trial.setup.sample.seed, "synthetic": trial.setup.sample.synthetic}
    return [{**base, **row} for row in rows]


def _inference(trial: Trial, places: Places) -> list[Row]:
    """Components and bounds, on the paper's six views of faces and the identity."""
    views = paper_views(trial.setup, places)
    sample = views.sample
    calibration, test = views.chosen(["identity", *STRATEGIES["Mixup + CutMix"]])
    steps, seed = trial.advi_steps, trial.setup.sample.seed
    # One concentration for all: ADVI's weights always have a Dirichlet prior, so EM's have it, too.
    plain = GaussianMixture(concentration=1.0, noise="none")
    ways: dict[str, tuple[GaussianMixture, EM | ADVI]] = {
        "EM, normal": (plain, EM()),
        "ADVI, normal, ELBO": (plain, ADVI(steps=steps)),
        "ADVI, normal, Renyi 0.5": (plain, ADVI(steps=steps, bound="renyi")),
        "ADVI, normal, IWAE": (plain, ADVI(steps=steps, bound="iwae")),
        "ADVI, student-t, ELBO": (replace(plain, component="student_t"), ADVI(steps=steps)),
        "ADVI, laplace, ELBO": (replace(plain, component="laplace"), ADVI(steps=steps)),
    }
    rows: list[Row] = []
    reference: Policy | None = None
    for name, (model, engine) in ways.items():
        policy = fit_policy(
            calibration, sample.labels, task="regression", model=model, engine=engine, guard=False, seed=seed
        )
        reference = reference or policy
        prediction = policy.predict(test)
        row = scores(prediction, sample.truth)
        row["crps"] = mean_crps(prediction, sample.truth)
        row |= {"bound": policy.elbo / sample.labels.size, "converged": policy.converged}
        row["from_em"] = float(np.abs(policy.weights - reference.weights).max())
        rows.append({"method": name, **row, "weights": round_list(policy.weights)})
    return rows


def _shift(trial: Trial, places: Places) -> list[Row]:
    """Weights from clean images, from corrupted labelled ones and from corrupted unlabelled ones."""
    trained = trained_network(trial.setup.sample, trial.setup.network, places)
    sample, seed = trained.sample, trial.setup.sample.seed
    rows_used = slice(0, trial.n_shift)
    labels, truth = sample.labels[rows_used], sample.truth[rows_used]
    conditions = [("none", 0), *((kind, strength) for kind in CORRUPTIONS for strength in (1, 2, 3))]
    views = _shift_views()
    rows: list[Row] = []
    clean: Policy | None = None
    for kind, strength in conditions:
        calibration, test = (
            trained.views(corrupt(images[rows_used], kind, strength, seed=part), views, draws=1, seed=seed)
            for part, images in enumerate((sample.calibration, sample.test))
        )
        here = _fit(calibration, labels)
        clean = clean or here
        unlabelled = fit_policy(
            test, None, task="classification", engine=ADVI(steps=trial.advi_steps // 2), guard=False, seed=seed
        )
        alone = test.select(["identity"])
        by_method = {
            "identity": (scores(uniform(alone, truth, alone, "classification"), truth), None),
            "uniform": (scores(uniform(test, truth, test, "classification"), truth), None),
            "weights of clean images": (scores(clean.predict(test), truth), clean),
            "weights of shifted images": (scores(here.predict(test), truth), here),
            "weights without labels": (scores(unlabelled.predict(test), truth), unlabelled),
        }
        for method, (row, policy) in by_method.items():
            weights = None if policy is None else round_list(policy.weights)
            rows.append({"corruption": kind, "strength": strength, "method": method, **row, "weights": weights})
    return rows


def _fit(calibration: ViewPredictions, labels: NDArray[Any]) -> Policy:
    return fit_policy(calibration, labels, task="classification", model=CategoricalMixture(), engine="em", guard=False)


def _shift_views() -> list[Augmentation]:
    """Views that might undo a corruption, and some that do not."""
    return [
        Identity(),
        HorizontalFlip(),
        Zoom(1.15),
        Rotate(10.0),
        Blur(0.7),
        Contrast(2.0),
        Contrast(0.75),
        Gamma(0.75),
    ]


def corrupt(images: NDArray[np.uint8], kind: str, strength: int, seed: int = 0) -> NDArray[np.uint8]:
    """Corrupt images (N, channels, H, W) by a kind of CORRUPTIONS (or "none") at strength 1, 2 or 3.

    Examples
    --------
    >>> image = np.array([[[[0, 200]]]], dtype=np.uint8)
    >>> corrupt(image, "contrast", 1)
    array([[[[ 50, 150]]]], dtype=uint8)
    """
    if kind == "none":
        return images
    if kind not in CORRUPTIONS or strength not in (1, 2, 3):
        raise ValueError(f"kind must be one of {sorted(CORRUPTIONS)} and strength 1, 2 or 3; got {kind!r}, {strength}.")
    amount = CORRUPTIONS[kind][strength - 1]
    pixels = images.astype(np.float64)
    if kind == "noise":
        pixels += 255 * amount * np.random.default_rng(seed).standard_normal(pixels.shape)
    elif kind == "blur":
        pixels = ndimage.gaussian_filter(pixels, sigma=(0, 0, amount, amount), mode="reflect")
    else:
        centre = pixels.mean(axis=(1, 2, 3), keepdims=True)
        pixels = centre + amount * (pixels - centre)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _table(rows: Rows, config: Config) -> str:
    """Components and bounds, then corruptions."""
    inference, steps, faces = select(rows, part="inference"), config.advi_steps, config.inference.sample
    body = []
    for method in dict.fromkeys(str(row["method"]) for row in inference):
        chosen = select(inference, method=method)
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
        f"{faces.n_calibration} held-out faces with two labels each; {steps} steps of ADVI with 8 draws, a "
        f"Dirichlet prior of concentration 1 throughout; {plural(n_seeds, 'seed')}.{made_up} The bound of EM counts "
        "parameters by their factorised posterior, ADVI's by a full-rank normal one. The same networks as in "
        "table 4, with what that table says of their size.\n\n"
        f"## Weights under distribution shift on CIFAR-10\n\n{second}\n\n"
        f"Accuracy / NLL, means over {plural(n_seeds, 'seed')}, up to {config.n_shift} test images, "
        f"corrupted here: {_strengths()}. Eight views that draw nothing at random. "
        "Weights are fitted on clean calibration images and their three human labels, on calibration images corrupted "
        "in the same way and the same labels (which knows the shift), or on the corrupted test images without any "
        f"label ({steps // 2} steps of ADVI). The mixtures fitted with labels have temperatures and a model of the "
        "annotators' errors; the one without labels only weights."
    )


def _saved(rows: Rows, method: str) -> Difference:
    """Test NLL saved on UTKFace against normal components and the ELBO."""
    normal, other = (select(rows, part="inference", method=f"ADVI, {name}") for name in ("normal, ELBO", method))
    return paired(normal, other, "nll")


def _enough(gap: Difference, least: float = 0.01) -> bool | str:
    """Whether nats of log loss are saved; a gain that is tiny or uncertain is said to be so."""
    if gap.mean <= 0:
        return False
    if not gap.clear:
        return "does not hold: a gain within two standard errors of none is no evidence"
    return gap.mean >= least or f"holds if a gain of {gap.mean:.4f} nats counts"


def _gained(rows: Rows, method: str, reference: str = "uniform") -> Difference:
    """Accuracy gained on corrupted images."""
    first, second = (
        [row for row in select(rows, part="shift", method=name) if row["strength"] != 0] for name in (method, reference)
    )
    return paired(first, second, "accuracy")


def _helps_under_shift(rows: Rows) -> bool | str:
    """Whether weights help under a shift: those of clean images, or only those fitted under the same shift."""
    if _gained(rows, "weights of clean images").clear:
        return True
    condition = "holds if the weights are fitted on labelled images with the same shift"
    return condition if _gained(rows, "weights of shifted images").clear else False


def _bounds_in_text(rows: Rows) -> str:
    normal, tight = (select(rows, part="inference", method=f"ADVI, normal, {bound}") for bound in ("ELBO", "IWAE"))
    return (
        f"the importance-weighted bound is higher than the ELBO by {paired(tight, normal, 'bound').text()} nats a "
        f"label; test NLL saved {_saved(rows, 'normal, IWAE').text()}"
    )


_CLAIMS = (
    Claim(
        "Future work: components other than the Gaussian may fit better",
        lambda rows: _enough(_saved(rows, "student-t, ELBO")),
        lambda rows: (
            f"test NLL saved on UTKFace by Student-t components {_saved(rows, 'student-t, ELBO').text()}, by Laplace "
            f"components {_saved(rows, 'laplace, ELBO').text()}"
        ),
    ),
    Claim(
        "Future work: tighter bounds could improve the optimisation",
        lambda rows: _enough(_saved(rows, "normal, IWAE")),
        _bounds_in_text,
    ),
    Claim(
        "Future work: the weights may help under distribution shift",
        _helps_under_shift,
        lambda rows: (
            "accuracy gained over uniform weights, on nine corruptions and all seeds (their standard errors take the "
            "corruptions of a seed for independent): "
            + "; ".join(f"{method} {_gained(rows, method).text()}" for method in METHODS[2:])
        ),
    ),
    Claim(
        "Not in the paper: weights should be fitted to the shifted images",
        lambda rows: _gained(rows, "weights of shifted images", "weights of clean images").verdict(),
        lambda rows: (
            "accuracy gained over weights of clean images "
            + _gained(rows, "weights of shifted images", "weights of clean images").text()
        ),
    ),
    Claim(
        "Not in the paper: weights inferred without labels are as good as uniform ones",
        lambda rows: (gap := _gained(rows, "weights without labels")).mean > -2 * gap.error,
        lambda rows: f"accuracy gained over uniform weights {_gained(rows, 'weights without labels').text()}",
    ),
)


@styled()
def _shift_figure(rows: Rows) -> Any:
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


def _pair(rows: Rows) -> str:
    return f"{spread(rows, 'accuracy').mean:.3f} / {spread(rows, 'nll').mean:.3f}"


def _strengths() -> str:
    meaning = {"noise": "standard deviation", "blur": "standard deviation in pixels", "contrast": "factor"}
    return ", ".join(f"{kind} ({meaning[kind]} {', '.join(map(str, CORRUPTIONS[kind]))})" for kind in CORRUPTIONS)


ITEM = Item(
    "Beyond the paper: Student-t components, tighter bounds, weights under distribution shift",
    2,
    {
        name: Config(seeds, SETUPS[name]["utkface"], SETUPS[name]["cifar10n"], steps, n_shift)
        for name, seeds, steps, n_shift in (
            ("smoke", (0,), 20, 30),
            ("cpu", (0, 1), 600, 500),
            ("paper", (0, 1, 2, 3, 4), 3000, 5000),
        )
    },
    _trials,
    _run_trial,
    _table,
    _CLAIMS,
    figures=lambda rows: {"shift": _shift_figure(rows)},
)
