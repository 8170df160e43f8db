"""Golden numbers: small problems of all tasks, and what the library answers today.

``python tests/golden.py --write`` regenerates ``tests/golden.json``; ``tests/test_golden.py`` compares. Three kinds:

* ``exact``: EM in plain steps on problems that converge in a few hundred of them, with every hyperparameter that a
  preliminary fit would choose stated. The answer is the optimum to rounding error, whatever the acceleration.
* ``accelerated``: EM as users call it, with extrapolation; stops near the optimum.
* ``sampled``: ADVI. The file holds the mean and the standard deviation over seeds.
"""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vbtta import (
    ADVI,
    EM,
    CategoricalLatent,
    CategoricalMixture,
    ConvergenceWarning,
    GaussianLatent,
    GaussianMixture,
    GuardWarning,
    LabelSets,
    OrdinalMixture,
    Policy,
    PyroModel,
    RankingMixture,
    ViewPredictions,
    fit_policy,
)

PATH = Path(__file__).with_name("golden.json")
NAMES = ["identity", "flip", "crop"]
SHARES = np.array([0.45, 0.3, 0.25])  # of the labels that follow each view
SEEDS = range(6)  # of the ADVI fits whose mean and spread are written
ROWS = 3  # inputs whose predictions are kept
PLAIN = EM(tol=0, max_steps=400, accelerate=False)
SHORT = replace(PLAIN, max_steps=150)  # for the probit link, whose steps are slow and few
TIGHT = EM(tol=1e-13, max_steps=3000)
SAMPLED = ADVI(steps=400, particles=4, learning_rate=0.05)

Data = tuple[ViewPredictions, Any]


# -- data -------------------------------------------------------------------------------------------


def number_data(
    seed: int, n: int = 60, outputs: int = 1, labels: int = 0, *, variance: bool = False, pooled: bool = False
) -> Data:
    """Views and numbers that follow one of them each, or their average; `labels` annotators with biases, or one label.

    Views are K = 3, rescaled and shifted; the first is called identity.
    """
    rng = np.random.default_rng(seed)
    views = rng.normal(size=(n, 1, outputs)) + 0.8 * rng.normal(size=(n, 3, outputs))
    choice = rng.choice(3, size=n, p=SHARES)
    truth = np.einsum("k,nkc->nc", SHARES, views) if pooled else 1.1 * views[np.arange(n), choice] + 0.2
    truth = truth + 0.2 * rng.normal(size=(n, outputs))
    spread = rng.exponential(0.05, size=views.shape) if variance else None
    predictions = ViewPredictions(views, spread, names=NAMES)
    if not labels:
        return predictions, LabelSets.from_array(truth[:, None])
    bias, noise = np.linspace(-0.3, 0.3, labels), np.linspace(0.1, 0.4, labels)
    values = truth[:, None] + bias[:, None] + noise[:, None] * rng.normal(size=(n, labels, outputs))
    return predictions, LabelSets.from_array(values, annotators=[f"annotator {u}" for u in range(labels)])


def class_data(
    seed: int, n: int = 60, classes: int = 3, labels: int = 0, *, variance: bool = False, pooled: bool = False
) -> Data:
    """Logits and classes drawn from one of the views each, or from their sum; `labels` annotators, or one label."""
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=(n, 3, classes))
    choice = rng.choice(3, size=n, p=SHARES)
    utility = np.einsum("k,nkc->nc", 2 * SHARES, logits) if pooled else logits[np.arange(n), choice]
    truth = (utility + 0.7 * rng.gumbel(size=(n, classes))).argmax(axis=1)
    spread = rng.exponential(0.3, size=logits.shape) if variance else None
    predictions = ViewPredictions(logits, spread, names=NAMES)
    if not labels:
        return predictions, LabelSets.from_array(truth)
    wrong = (truth[:, None] + rng.integers(1, classes, size=(n, labels))) % classes
    values = np.where(rng.random((n, labels)) < np.linspace(0.9, 0.7, labels), truth[:, None], wrong)
    return predictions, LabelSets.from_array(values, annotators=[f"annotator {u}" for u in range(labels)])


def level_data(seed: int, n: int = 60) -> Data:
    """Scores and three ordered levels."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, 1)) + 0.8 * rng.normal(size=(n, 3))
    followed = scores[np.arange(n), rng.choice(3, size=n, p=SHARES)]
    levels = np.digitize(followed + 0.3 * rng.normal(size=n), [-0.7, 0.8])
    return ViewPredictions(scores[:, :, None], names=NAMES), LabelSets.from_array(levels)


def ranking_data(seed: int, n: int = 60, items: int = 4) -> Data:
    """Scores of four items and their order; every other ranking ends after two items."""
    rng = np.random.default_rng(seed)
    scores = 1.5 * rng.normal(size=(n, 3, items))
    followed = scores[np.arange(n), rng.choice(3, size=n, p=SHARES)] + 0.5 * rng.gumbel(size=(n, items))
    orders = np.argsort(-followed, axis=1)
    rankings = [order[: 2 if row % 2 else items].tolist() for row, order in enumerate(orders)]
    return ViewPredictions(scores, names=NAMES), LabelSets.from_rankings(rankings)


def count_data(seed: int, n: int = 60) -> Data:
    """The same as four labels an input, given as counts of the classes."""
    predictions, labels = class_data(seed, n, labels=4)
    counts = np.zeros((n, 3))
    np.add.at(counts, (labels.instance, labels.value), 1)
    return predictions, LabelSets.from_counts(counts)


def useless_data(seed: int, n: int = 150, useless: int = 1) -> Data:
    """Numbers that follow the identity view; the others are noise."""
    rng = np.random.default_rng(seed)
    views = rng.normal(size=(n, 1 + useless, 1))
    names = ["identity", *(f"noise {k}" for k in range(useless))]
    return ViewPredictions(views, names=names), LabelSets.from_array(views[:, 0] + 0.1 * rng.normal(size=(n, 1)))


# -- models of a user's own ---------------------------------------------------------------------------


def laplace_labels(predictions: Any, labels: Any, prior: Any) -> None:
    """Numbers that stray like a Laplace variable around their view."""
    import pyro
    import torch

    views = prior.sample(predictions)
    around = pyro.distributions.Laplace(views.location[labels.instance], views.scale[labels.instance])
    each = around.log_prob(labels.value[:, None]).sum(dim=-1)
    pyro.factor("labels", (labels.count * torch.logsumexp(views.log_weights + each, dim=-1)).sum())


def mixed_classes(predictions: Any, labels: Any, prior: Any) -> None:
    """Classes from the mixture of the views: what CategoricalMixture without noise says."""
    import pyro
    import torch

    views = prior.sample(predictions)
    mixed = torch.logsumexp(views.log_weights[:, None] + views.log_proba, dim=1)
    pyro.factor("labels", (labels.count * mixed[labels.instance, labels.value]).sum())


# -- problems -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoldenProblem:
    """Data, a model record and an engine."""

    name: str
    task: str
    model: Any
    data: Callable[..., Data]
    options: dict[str, Any] = field(default_factory=dict)
    engine: Any = PLAIN
    guard: bool = False

    @property
    def kind(self) -> str:
        """How closely its answers must agree: "exact", "accelerated", "sampled" or "default"."""
        if isinstance(self.engine, str):
            return "default"
        if isinstance(self.engine, ADVI):
            return "sampled"
        return "accelerated" if self.engine.accelerate else "exact"

    def fit(self, seed: int = 0) -> tuple[Policy, Data]:
        """The policy and the data it was fitted to."""
        predictions, labels = self.data(**self.options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # short ADVI runs
            warnings.simplefilter("ignore", GuardWarning)  # one of the default fits falls back
            policy = fit_policy(
                predictions,
                labels,
                task=self.task,
                model=self.model,
                engine=self.engine,
                guard=self.guard,
                seed=seed,
            )
        return policy, (predictions, labels)


def _numbers(name: str, model: Any, *, seed: int, engine: Any = PLAIN, **options: Any) -> GoldenProblem:
    return GoldenProblem(name, "regression", model, number_data, {"seed": seed, **options}, engine)


def _classes(name: str, model: Any, *, seed: int, engine: Any = PLAIN, **options: Any) -> GoldenProblem:
    return GoldenProblem(name, "classification", model, class_data, {"seed": seed, **options}, engine)


def _default(name: str, task: str, data: Callable[..., Data], **options: Any) -> GoldenProblem:
    return GoldenProblem(name, task, "auto", data, options, "auto", guard=True)


PROBLEMS = (
    _numbers("gaussian mixture", GaussianMixture(noise="none", v=0.05), seed=1),
    _numbers("gaussian mixture, shift", GaussianMixture(noise="none", link="shift", v=0.05), seed=2),
    _numbers("gaussian mixture, two outputs", GaussianMixture(noise="none", v=0.05), seed=3, outputs=2),
    _numbers("gaussian mixture, concentration", GaussianMixture(noise="none", v=0.05, concentration=2.0), seed=4),
    _numbers(
        "gaussian mixture, heteroscedastic",
        GaussianMixture(noise="none", v=0.05, heteroscedastic=True),
        seed=5,
        variance=True,
    ),
    _numbers("gaussian mixture, annotators", GaussianMixture(noise="annotator", v=0.05), seed=6, labels=3),
    _numbers(
        "gaussian mixture, annotators, two outputs",
        GaussianMixture(noise="annotator", v=0.05, concentration=1.5),
        seed=7,
        labels=3,
        outputs=2,
        engine=replace(PLAIN, max_steps=1200),
    ),
    _numbers("gaussian latent", GaussianLatent(noise="none", v=0.05, shrinkage=2.0), seed=8, pooled=True),
    _numbers(
        "gaussian latent, annotators, two outputs",
        GaussianLatent(noise="annotator", v=0.05, shrinkage=2.0),
        seed=9,
        pooled=True,
        labels=3,
        outputs=2,
    ),
    _classes("categorical mixture", CategoricalMixture(noise="none"), seed=11),
    _classes("categorical mixture, uncalibrated", CategoricalMixture(noise="none", calibrate=False), seed=12),
    _classes(
        "categorical mixture, probit", CategoricalMixture(noise="none", link="probit"), seed=13, n=30, engine=SHORT
    ),
    _classes(
        "categorical mixture, probit, variance",
        CategoricalMixture(noise="none", link="probit", concentration=1.5),
        seed=14,
        n=30,
        variance=True,
        engine=SHORT,
    ),
    _classes("categorical mixture, class weights", CategoricalMixture(noise="none", weights="view_class"), seed=15),
    _classes("categorical mixture, uniform noise", CategoricalMixture(noise="uniform"), seed=16, labels=3),
    _classes("categorical mixture, annotators", CategoricalMixture(noise="annotator"), seed=17, labels=3),
    _classes(
        "categorical mixture, confusion", CategoricalMixture(noise="confusion", concentration=1.5), seed=18, labels=3
    ),
    GoldenProblem(
        "categorical mixture, counts", "classification", CategoricalMixture(noise="none"), count_data, {"seed": 19}
    ),
    _classes("categorical latent", CategoricalLatent(noise="none", shrinkage=2.0), seed=21, pooled=True),
    _classes(
        "categorical latent, probit",
        CategoricalLatent(noise="none", link="probit", shrinkage=2.0),
        seed=22,
        pooled=True,
    ),
    _classes(
        "categorical latent, annotators",
        CategoricalLatent(noise="annotator", shrinkage=2.0),
        seed=23,
        pooled=True,
        labels=3,
    ),
    _classes(
        "categorical latent, confusion",
        CategoricalLatent(noise="confusion", shrinkage=2.0),
        seed=24,
        pooled=True,
        labels=3,
    ),
    _numbers("gaussian mixture, accelerated", GaussianMixture(noise="none"), seed=31, engine=TIGHT, n=200),
    _numbers("gaussian latent, accelerated", GaussianLatent(noise="none"), seed=32, engine=TIGHT, n=200, pooled=True),
    GoldenProblem(
        "zero weight", "regression", GaussianMixture(noise="none", v=0.01), useless_data, {"seed": 35}, TIGHT
    ),
    _classes("categorical mixture, accelerated", CategoricalMixture(noise="none"), seed=33, engine=TIGHT, n=200),
    _classes("categorical latent, accelerated", CategoricalLatent(noise="none"), seed=34, engine=TIGHT, pooled=True),
    _numbers("gaussian mixture, ADVI", GaussianMixture(noise="none", v=0.05), seed=41, engine=SAMPLED),
    _numbers(
        "gaussian mixture, annotators, ADVI",
        GaussianMixture(noise="annotator", v=0.05, link="shift"),
        seed=42,
        labels=3,
        engine=SAMPLED,
    ),
    _numbers(
        "gaussian mixture, Student t, ADVI",
        GaussianMixture(noise="none", v=0.05, component="student_t"),
        seed=43,
        engine=SAMPLED,
    ),
    _numbers(
        "gaussian latent, ADVI",
        GaussianLatent(noise="none", v=0.05, shrinkage=2.0),
        seed=44,
        pooled=True,
        engine=SAMPLED,
    ),
    _classes("categorical mixture, ADVI", CategoricalMixture(noise="none"), seed=45, engine=SAMPLED),
    _classes(
        "categorical mixture, confusion, ADVI", CategoricalMixture(noise="confusion"), seed=46, labels=3, engine=SAMPLED
    ),
    _classes(
        "categorical latent, ADVI", CategoricalLatent(noise="none", shrinkage=2.0), seed=47, pooled=True, engine=SAMPLED
    ),
    GoldenProblem("ordinal mixture", "ordinal", OrdinalMixture(), level_data, {"seed": 48}, SAMPLED),
    GoldenProblem("ranking mixture", "ranking", RankingMixture(), ranking_data, {"seed": 49}, SAMPLED),
    _numbers("pyro model", PyroModel(laplace_labels), seed=50, engine=SAMPLED),
    _default("default, numbers", "regression", number_data, seed=61, n=150),
    _default("default, pooled numbers", "regression", number_data, seed=62, n=150, pooled=True),
    _default("default, classes", "classification", class_data, seed=63, n=150),
    _default("default, pooled classes", "classification", class_data, seed=64, n=150, pooled=True),
    _default("default, useless views", "regression", useless_data, seed=3, n=15, useless=8),
)


# -- answers ------------------------------------------------------------------------------------------


def answers(policy: Policy, data: Data) -> dict[str, Any]:
    """What is frozen of a policy: numbers, by name."""
    predictions, labels = data
    record: dict[str, Any] = {
        "weights": policy.weights,
        "member_weights": policy.member_weights,
        "gain": [member.gain for member in policy.members],
        "elbo": [member.elbo for member in policy.members],
        "weight_interval": policy.weight_interval(0.9),
        "score": policy.score(predictions, labels).sum(),
        **{f"elbo_terms.{name}": value for name, value in policy.elbo_terms.items()},
        **_distribution("predict", policy.predict(predictions)),
        **_distribution("consensus", policy.consensus(predictions, labels)),
    }
    if policy.class_weights is not None:
        record["class_weights"] = policy.class_weights
    people = policy.annotators
    if people is not None:
        fields = ("bias", "noise") if policy.task == "regression" else ("accuracy", "confusion")
        record.update({f"annotators.{name}": getattr(people, name) for name in fields})
    if policy.guard.checked:
        record["guard.fell_back"] = policy.guard.fell_back
        record["guard.difference"] = policy.guard.difference
        record["guard.standard_error"] = policy.guard.standard_error
        record["guard.probability"] = policy.guard.probability
    return {name: np.asarray(value, dtype=np.float64).tolist() for name, value in record.items()}


def _distribution(name: str, prediction: Any) -> dict[str, Any]:
    if hasattr(prediction, "proba"):
        parts = {"proba": prediction.proba, "mutual_information": prediction.mutual_information}
    else:
        parts = {"mean": prediction.mean, "variance": prediction.variance, "quantile": prediction.quantile(0.1)}
    return {f"{name}.{part}": values[:ROWS] for part, values in parts.items()}


def golden_record(problem: GoldenProblem) -> dict[str, Any]:
    """What the file holds of a problem."""
    seeds = SEEDS if problem.kind == "sampled" else (0,)
    fits = [problem.fit(seed) for seed in seeds]
    records = [answers(policy, data) for policy, data in fits]
    record: dict[str, Any] = {"kind": problem.kind, "model": type(fits[0][0].model).__name__, "answers": records[0]}
    if problem.kind == "sampled":
        names = [name for name in records[0] if not name.startswith("elbo_terms")]
        values = {name: np.array([record[name] for record in records]) for name in names}
        record["answers"] = {name: value.mean(axis=0).tolist() for name, value in values.items()}
        record["spread"] = {name: value.std(axis=0, ddof=1).tolist() for name, value in values.items()}
    return record


def _write() -> None:
    records = {problem.name: golden_record(problem) for problem in PROBLEMS}
    lines = [f"  {json.dumps(name)}: {json.dumps(record, allow_nan=False)}" for name, record in records.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/golden.py --write")
    _write()
