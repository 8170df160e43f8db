"""Small and degenerate calibration samples for every model: a fit succeeds with finite numbers or is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.base import Family, Rng, check, check_finite, pick, scalar
from vbtta import (
    ADVI,
    EM,
    CategoricalLatent,
    CategoricalMixture,
    GaussianLatent,
    GaussianMixture,
    LabelSets,
    OrdinalMixture,
    Policy,
    RankingMixture,
    ViewPredictions,
    conformalize,
    diagnose,
    fit_baseline,
    fit_policy,
    fit_sequential,
    select_views,
)

_REGRESSION: tuple[Any, ...] = (
    "auto", "auto", "mixture", "latent", GaussianMixture(link="shift"), GaussianMixture(noise="annotator"),
    GaussianMixture(scale="constant"), GaussianMixture(weights="input"), GaussianMixture(concentration=0.5),
    GaussianLatent(noise="annotator"), GaussianMixture(heteroscedastic=True), GaussianLatent(shrinkage=1.0),
)  # fmt: skip
_CLASSIFICATION: tuple[Any, ...] = (
    "auto", "auto", "mixture", "latent", CategoricalMixture(weights="view_class"), CategoricalMixture(weights="input"),
    CategoricalMixture(calibrate=False), CategoricalMixture(link="probit"), CategoricalLatent(link="probit"),
    CategoricalMixture(noise="annotator"), CategoricalMixture(noise="confusion"), CategoricalLatent(noise="uniform"),
    CategoricalLatent(noise="annotator"), CategoricalMixture(concentration=0.5),
)  # fmt: skip
_ENGINE = ADVI(steps=30, particles=2)


def _views(rng: Rng, truth: Any, K: int) -> Any:
    """Outputs (N, K, C) of views that are perfect, constant, doubled, huge, tiny, opposite or noise."""
    N, C = truth.shape
    outputs = np.empty((N, K, C))
    common = rng.normal(size=(N, C))
    kinds = rng.integers(11, size=K) if rng.random() < 0.7 else np.full(K, int(rng.integers(11)))
    for k, kind in enumerate(kinds):
        outputs[:, k] = (
            truth, truth, truth + 10.0 ** rng.integers(-12, 2) * rng.normal(size=(N, C)), 0 * truth + rng.integers(3),
            common, -truth, 1e6 * truth + 1e8, 1e-9 * truth, rng.normal(size=(N, C)), np.round(truth), truth[::-1],
        )[kind]  # fmt: skip
    scale = pick(rng, (1.0, 1.0, 1.0, 1e-8, 1e8, 1e50, 1e-50, 100.0))
    return outputs * scale, scale


def _sizes(rng: Rng) -> tuple[int, int]:
    N = int(pick(rng, (1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 40, 100)))
    K = int(pick(rng, (1, 2, 2, 3, 5, 10, 50)))
    return N, K if N * K <= 1500 else 3


def _labels(rng: Rng, values: Any) -> Any:
    """One label each, several, gaps, annotators, counts or weights."""
    N = len(values)
    kind = int(rng.integers(6))
    if kind <= 1:
        return LabelSets.from_array(values[:, None] if values.ndim == 2 else values)
    if kind == 2:
        rows = np.sort(rng.integers(0, N, size=2 * N))
        return LabelSets.from_table(rows, values[rows], n_instances=N)
    if kind == 3:
        rows = np.repeat(np.arange(N), 2)
        people = np.tile(["ann", "bob"], N)
        return LabelSets.from_table(rows, values[rows], people, n_instances=N)
    if kind == 4:
        rows = np.sort(rng.permutation(N)[: max(1, N // 2)])
        return LabelSets.from_table(rows, values[rows], count=rng.integers(1, 4, size=len(rows)), n_instances=N)
    labels = LabelSets.from_array(values[:, None] if values.ndim == 2 else values)
    return labels.with_weights(10.0 ** rng.uniform(-6, 6, size=N))


def regression_data(rng: Rng) -> tuple[ViewPredictions, Any]:
    """Views and labels of a regression."""
    N, K = _sizes(rng)
    C = int(pick(rng, (1, 1, 1, 2, 3, 5)))
    truth = pick(rng, (rng.normal(size=(N, C)), rng.integers(0, 3, size=(N, C)).astype(float), np.zeros((N, C)),
                       np.ones((N, C)), np.repeat(rng.normal(size=(N, 1)), C, axis=1), 1e-300 * rng.normal(size=(N, C)),
                       rng.standard_cauchy(size=(N, C)), np.arange(N * C, dtype=float).reshape(N, C)))  # fmt: skip
    outputs, scale = _views(rng, truth, K)
    values = truth * pick(rng, (scale, 1.0)) + pick(rng, (0.0, 0.0, 1e6))
    variance = pick(rng, (None, None, np.zeros(outputs.shape), outputs**2, np.full(outputs.shape, 1e-300)))
    if variance is not None and variance.max() > 1e99:
        variance = None
    return _predictions(rng, outputs, variance, K, N), _labels(rng, values)


def class_data(rng: Rng) -> tuple[ViewPredictions, Any]:
    """Logits and labels of a classification."""
    N, K = _sizes(rng)
    C = int(pick(rng, (1, 2, 2, 3, 3, 5, 20)))
    label = pick(rng, (rng.integers(C, size=N), np.zeros(N, dtype=int), np.arange(N) % C, np.full(N, C - 1)))
    truth = np.eye(C)[label] * pick(rng, (1.0, 5.0, 50.0, 1e3, 0.0))
    outputs, _ = _views(rng, truth, K)
    if rng.random() < 0.3:  # log probabilities, some of them very small
        outputs = np.maximum(outputs - np.max(outputs, axis=2, keepdims=True), -700)
    return _predictions(rng, outputs, None, K, N), _labels(rng, label)


def _predictions(rng: Rng, outputs: Any, variance: Any, K: int, N: int) -> ViewPredictions:
    names = pick(rng, (None, ["identity", *(f"v{k}" for k in range(1, K))], [f"v{k}" for k in range(K)]))
    groups = np.arange(N) // 2 if rng.random() < 0.15 else None
    precision = pick(rng, (np.float64, np.float64, np.float32))
    largest = np.abs(outputs).max(initial=0)
    if precision is np.float32 and largest < 1e30:
        outputs = outputs.astype(np.float32)
        variance = None if variance is None or variance.max() > 1e30 else variance.astype(np.float32)
    return ViewPredictions(outputs, variance, names=names, groups=groups)


def _fit(rng: Rng, folder: Path, task: str, model: Any, data: tuple[ViewPredictions, Any], engine: Any = "auto") -> str:
    predictions, labels = data
    guard = pick(rng, (True, True, False, "hard"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = fit_policy(predictions, labels, task=task, model=model, engine=engine, guard=guard)
        predicted: Any = policy.predict(predictions)
        weights, intervals = policy.weights, policy.weight_interval(0.9)
        scores = policy.score(predictions, labels)
        consensus: Any = policy.consensus(predictions, labels)
    strange = [entry for entry in caught if issubclass(entry.category, RuntimeWarning)]
    check(not strange, f"a fit that succeeds warns: {strange[0].message if strange else ''}")
    check_finite("weights", weights, intervals)
    check((weights >= 0).all() and abs(weights.sum() - 1) < 1e-6, f"weights {weights} are no shares")
    check((intervals[:, 0] <= weights + 1e-9).all() and (weights <= intervals[:, 1] + 1e-9).all(), "outside intervals")
    for prediction in (predicted, consensus):
        if task == "regression":
            check_finite("prediction", prediction.mean, prediction.variance, *prediction.interval(0.9))
            check((prediction.variance >= 0).all(), "a variance below zero")
        else:
            check_finite("prediction", prediction.proba, prediction.entropy)
            check(np.allclose(prediction.proba.sum(axis=1), 1), "probabilities do not sum to one")
    check_finite("scores", scores)
    check_finite("guard", policy.guard[2:4], policy.guard.probability)
    path = folder / "policy.json"
    policy.save(path)
    again: Any = Policy.load(path).predict(predictions)
    one, other = (part.proba if task != "regression" else part.mean for part in (predicted, again))
    check(np.array_equal(one, other), "a saved policy predicts otherwise")
    return "fitted"


def regression(rng: Rng, folder: Path) -> str:
    """Every regression model and the default."""
    return _fit(rng, folder, "regression", pick(rng, _REGRESSION), regression_data(rng))


def classification(rng: Rng, folder: Path) -> str:
    """Every model of classes and the default."""
    return _fit(rng, folder, "classification", pick(rng, _CLASSIFICATION), class_data(rng))


def sampled(rng: Rng, folder: Path) -> str:
    """A few steps of ADVI, ordered levels and rankings included."""
    kind = int(rng.integers(4))
    if kind == 0:
        model = pick(rng, ("mixture", "latent", GaussianMixture(component="student_t")))
        return _fit(rng, folder, "regression", model, regression_data(rng), _ENGINE)
    if kind == 1:
        return _fit(rng, folder, "classification", pick(rng, ("mixture", "latent")), class_data(rng), _ENGINE)
    N, K = (int(pick(rng, sizes)) for sizes in ((1, 2, 5, 10), (1, 2, 3)))
    if kind == 2:
        level = rng.integers(0, 3, size=N)
        outputs, _ = _views(rng, level[:, None].astype(float), K)
        return _fit(rng, folder, "ordinal", OrdinalMixture(), (ViewPredictions(outputs), level), _ENGINE)
    C = int(rng.integers(1, 5))
    truth = rng.normal(size=(N, C))
    outputs, _ = _views(rng, truth, K)
    orders = LabelSets.from_rankings(list(np.argsort(-truth, axis=1)))
    return _fit(rng, folder, "ranking", RankingMixture(), (ViewPredictions(outputs), orders), _ENGINE)


def around(rng: Rng, folder: Path) -> str:
    """What is done with a sample besides fitting: selection, stages, conformal sets, baselines, diagnosis."""
    task = pick(rng, ("regression", "classification"))
    predictions, labels = regression_data(rng) if task == "regression" else class_data(rng)
    predictions = predictions.select(predictions.names[:4])  # every set of views is fitted
    way = int(rng.integers(5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == 0:
            policy = select_views(predictions, labels, task=task, budget=int(rng.integers(1, 4)), model="latent")
            check_finite("weights", policy.weights)
        elif way == 1:
            staged = fit_sequential(predictions, labels, task=task, model="latent")
            predicted: Any = staged.predict(predictions)
            check_finite("prediction", predicted.mean if task == "regression" else predicted.proba)
        elif way == 2:
            half = predictions.take(slice(0, None, 2)), labels.take(np.arange(0, len(predictions), 2))
            rest = predictions.take(slice(1, None, 2)), labels.take(np.arange(1, len(predictions), 2))
            policy = fit_policy(*half, task=task, model="latent", guard=False)
            conformal = conformalize(policy, *rest, level=0.5)
            ask = conformal.predict_interval if task == "regression" else conformal.predict_set
            values = np.asarray(ask(predictions))
            check(values.dtype == bool or not np.isnan(values).any(), "NaN in a conformal limit")
        elif way == 3:
            name = pick(rng, ("uniform", "greedy", "weighted", "linear", "temperature"))
            baseline = fit_baseline(name, predictions, labels, task=task)
            predicted = baseline.predict(predictions)
            check_finite("prediction", predicted.mean if task == "regression" else predicted.proba)
        else:
            policy = fit_policy(predictions, labels, task=task, model="latent", guard=False)
            check(str(diagnose(policy, predictions, labels)), "an empty diagnosis")
    strange = [entry for entry in caught if issubclass(entry.category, RuntimeWarning)]
    check(not strange, f"a call that succeeds warns: {strange[0].message if strange else ''}")
    return "done"


def options(rng: Rng, folder: Path) -> str:
    """fit_policy and the model records with odd options."""
    views = ViewPredictions(rng.normal(size=(8, 2, 1)), names=["identity", "a"])
    label = rng.normal(size=8)
    records: tuple[Any, ...] = (GaussianMixture, GaussianLatent, CategoricalMixture, CategoricalLatent, EM, ADVI,
                                OrdinalMixture, RankingMixture)  # fmt: skip
    if rng.random() < 0.7:
        kind = pick(rng, records)
        name = pick(rng, sorted(kind.__dataclass_fields__))
        record = kind(**{name: scalar(rng)})
        if kind in (GaussianMixture, GaussianLatent) or (kind is EM and (record.max_steps or 0) <= 2000):
            arguments = {"engine": record} if kind is EM else {"model": record}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                model = {"model": "latent", **arguments}
                check_finite("weights", fit_policy(views, label, task="regression", guard=False, **model).weights)
        return "accepted"
    arguments = {"task": "regression", "model": "latent"}
    arguments[pick(rng, ("task", "model", "engine", "guard", "seed"))] = scalar(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit_policy(pick(rng, (views, views, scalar(rng))), pick(rng, (label, label, scalar(rng))), **arguments)
    return "accepted"


FAMILIES = (
    Family("fits, regression", regression, 0.005),
    Family("fits, classification", classification, 0.003),
    Family("fits by ADVI", sampled, 0.0004),
    Family("selection, stages, sets, baselines, diagnosis", around, 0.0006),
    Family("options", options, 0.02),
)
