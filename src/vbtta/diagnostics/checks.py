"""Contributions and drift of the views, predictive checks of the label sets, sensitivity of the weights to priors."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import optimize, special

from vbtta.crossval import CrossValidated, compare_scores, cross_validate, folds_of
from vbtta.data.labels import Array, LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.normality import holm
from vbtta.distributions import CategoricalPrediction, Prediction, draw_positions
from vbtta.fit import Candidate, quick_fit
from vbtta.inference.em import EM
from vbtta.metrics import entropy
from vbtta.models.base import InMemory
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.label_noise import AnnotatorAccuracy
from vbtta.policy import ConvergenceWarning, Policy

_MAX_CHECKED, _MAX_REFITTED = 4_000, 1_000  # instances of a check, and of one that fits many times
_MIN_SHIFT = 0.1  # standard deviations: smaller shifts are significant in large samples, and harmless
_MIN_SHARED = 20  # instances that two annotators have labelled, to ask whether they copy
_FACTOR = 3.0  # by which every prior is multiplied and divided
_PRIORS = ("beta", "gamma", "nu", "shrinkage", "kappa_scale", "xi_scale", "offset_scale", "confusion_prior")
_OF_NOISE = {"gamma": "annotator", "confusion_prior": "confusion"}  # priors of one noise model only

Draw = Callable[[np.random.Generator], Array]  # new labels: (J,) class positions or (J, C) numbers
Statistic = Callable[[Array], float]  # of labels


class Overlap(NamedTuple):
    """Which views explain the same label sets."""

    names: tuple[str, ...]  # the views of positive weight
    share: Array  # (K,): of the label sets that a view explains, by the posterior of the view given the labels
    matrix: Array  # (K, K): 1 where two views explain the same sets in the same proportions, 0 where never the same


class HeavyView(NamedTuple):
    """The inputs for which a view is the heaviest."""

    name: str
    share: float  # of the inputs
    contrast: Array  # (F,): mean of its features there less that elsewhere, in standard deviations
    examples: tuple[str, ...]  # inputs with the largest weights, by id or row


class GateUse(NamedTuple):
    """Weights that depend on the input: on what, and which views are heavy where."""

    features: tuple[str, ...]
    pooled: bool  # features are averages over a group
    coefficients: Array  # (F,)
    interval: Array  # (F, 2): 90 %
    views: tuple[HeavyView, ...]  # those that are the heaviest for some inputs, the most frequent first


class Influence(NamedTuple):
    """Changes when one view is left out; zero for views without weight."""

    names: tuple[str, ...]
    score: Array  # (K,): of the cross-validated log score of an instance, on average
    standard_error: Array  # (K,): of `score`


Agreement = Callable[[Array, Array], tuple[Array, Array]]  # of two annotators' labels: chance p, and are they the same


class Copying(NamedTuple):
    """How often two annotators say the same beyond what independent errors explain."""

    first: str
    second: str
    n_instances: int  # that both have labelled
    copied: float  # share of the labels of one that are copies of the other's
    p_value: float  # of that share being the median of all pairs, corrected for their number (Holm)


class DriftCheck(NamedTuple):
    """A signal at calibration time and now."""

    signal: str
    reference: float  # mean at calibration time
    incoming: float  # mean now
    shift: float  # difference in standard deviations of calibration time
    p_value: float  # Kolmogorov-Smirnov, Holm-corrected


class Drift(NamedTuple):
    """Whether incoming views differ from those of calibration time."""

    drifted: bool
    checks: tuple[DriftCheck, ...]
    n_reference: int
    n_incoming: int


class PredictiveCheck(NamedTuple):
    """A statistic of the label sets, observed and simulated."""

    statistic: str
    observed: float
    expected: float  # mean over simulations
    low: float  # of the central 95 %
    high: float
    p_value: float  # two-sided share of simulations that are as extreme


class Sensitivity(NamedTuple):
    """Change of the weights when one prior is changed."""

    prior: str
    factor: float
    distance: float  # total variation between the two sets of weights, 0 to 1


def two_class(policy: Policy, predictions: ViewPredictions | None) -> tuple[Policy, Any]:
    """A multi-label policy and its views as two-class problems, one an output; others as they are."""
    if not policy.multilabel:
        return policy, predictions
    policy = replace(policy, multilabel=False, n_outputs=2, classes=np.array(["no", "yes"]))
    if predictions is not None:
        predictions = predictions.as_binary()
        predictions.classes = policy.classes
    return policy, predictions


def label_sets(labels: Any, policy: Policy) -> LabelSets | None:
    """Labels as `fit_policy` reads them."""
    if labels is None or isinstance(labels, LabelSets):
        return labels
    return LabelSets.from_multilabel(labels) if policy.multilabel else LabelSets.from_array(labels)


def gate_of(policy: Policy, predictions: ViewPredictions) -> GateUse | None:
    """The features that the weights depend on, and the heaviest views; None if the weights are constant."""
    member = next((part for part in policy.members if part.gate is not None), None)
    if member is None or member.gate is None:
        return None
    gate, used = member.gate, predictions.select(member.used_names)
    raw, weights = gate.features.raw(used), gate.weights_for(used)  # (N, K, F), (N, K)
    heaviest = weights.argmax(axis=1)
    views = []
    places, times = np.unique(heaviest, return_counts=True)
    for k in places[np.argsort(-times, kind="stable")]:
        rows = heaviest == k
        elsewhere = raw[rows if rows.all() else ~rows, k].mean(axis=0)
        top = np.argsort(-weights[:, k], kind="stable")[:4]
        names = tuple(str(row if predictions.ids is None else predictions.ids[row]) for row in top if rows[row])
        contrast = (raw[rows, k].mean(axis=0) - elsewhere) / np.where(gate.scale > 0, gate.scale, np.inf)
        views.append(HeavyView(used.names[k], float(rows.mean()), contrast, names))
    interval = gate.interval(0.9)
    return GateUse(gate.names, gate.features.choice == "pooled", gate.coefficients, interval, tuple(views))


def effective_views(weights: Array) -> float:
    """Exponential of the weights' entropy: K where all are equal, 1 where one has all the weight."""
    return float(np.exp(entropy(weights)))


def overlap_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> Overlap:
    """How often two views explain the same labels: cosines of the posterior probabilities that a view made them."""
    names = policy.fitted or policy.names
    used = np.flatnonzero(policy.posterior.weights > 0)
    places = [policy.names.index(names[k]) for k in used]
    weights = policy.weights_for(predictions)[labels.labelled][:, places]
    scores = [policy.restrict([k]).score(predictions, labels) for k in used.tolist()]
    share = special.softmax(np.stack(scores, axis=1) + np.log(np.maximum(weights, 1e-300)), axis=1)  # (N+, K)
    gram = share.T @ share
    size = np.sqrt(np.maximum(np.diagonal(gram), np.finfo(np.float64).tiny))
    return Overlap(tuple(names[k] for k in used), share.mean(axis=0), gram / np.outer(size, size))


def influence_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, seed: int = 0) -> Influence:
    """Change of held-out scores without each view of positive weight in turn; needs a model that EM fits."""
    policy, engine, views, sample_labels = _refitted_sample(policy, predictions, labels, seed)
    fitted, folds = policy.fitted or policy.names, folds_of(views, sample_labels, seed)
    fit = partial(quick_fit, Candidate(policy.model, None), engine, seed)

    def scores(names: Sequence[str]) -> CrossValidated:
        return cross_validate([fit], InMemory(views.select(names), sample_labels), folds)[0]

    score, error = np.zeros((2, len(policy.names)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # only differences matter
        full_scores = scores(fitted)
        for k, name in enumerate(policy.names):
            if policy.weights[k] > 0 and len(fitted) > 1:
                reduced_scores = scores([view for view in fitted if view != name])
                score[k], error[k] = compare_scores(reduced_scores, full_scores)
    return Influence(policy.names, score, error)


def _refitted_sample(
    policy: Policy, predictions: ViewPredictions, labels: LabelSets, seed: int
) -> tuple[Policy, EM, ViewPredictions, LabelSets]:
    """The heaviest member, its engine, and the data of some labelled instances to refit it to."""
    policy = policy.members[int(policy.member_weights.argmax())]
    assert isinstance(policy.engine, EM)  # ADVI takes too long to fit again
    rows = np.sort(np.random.default_rng(seed).permutation(labels.labelled)[:_MAX_REFITTED])
    views = predictions.select(policy.names).take(rows)
    return policy, replace(policy.engine, keep_states=False), views, labels.take(rows)


def view_signals(policy: Policy, predictions: ViewPredictions) -> dict[str, Array]:
    """Signals of every input that need no label, such as confidence and the views' agreement: by name, (N,) each."""
    prediction = policy.predict(predictions)
    used = np.flatnonzero(policy.weights > 0)
    outputs = np.asarray(predictions.select([policy.names[k] for k in used]).outputs, dtype=np.float64)  # (N, K, C)
    weights = policy.weights[used]
    if isinstance(prediction, CategoricalPrediction):
        chosen = prediction.proba.argmax(axis=1)
        return {
            "confidence": prediction.proba.max(axis=1),
            "agreement": (outputs.argmax(axis=2) == chosen[:, None]) @ weights,
            "mutual information": prediction.mutual_information,
        }
    centre = np.einsum("k,nkc->nc", weights, outputs)
    between = np.sqrt(np.einsum("k,nkc->nc", weights, (outputs - centre[:, None]) ** 2))
    signals = {"predicted deviation": np.sqrt(prediction.variance).mean(axis=1), "disagreement": between.mean(axis=1)}
    for c in range(prediction.mean.shape[1]):
        signals["prediction" if prediction.mean.shape[1] == 1 else f"prediction {c}"] = prediction.mean[:, c]
    return signals


def drift_of(policy: Policy, reference: ViewPredictions, incoming: ViewPredictions, *, level: float = 0.01) -> Drift:
    """Compare incoming views with those of calibration time, signal by signal; no labels needed."""
    from scipy import stats

    before, now = view_signals(policy, reference), view_signals(policy, incoming)
    p_values = holm([stats.ks_2samp(before[name], now[name], method="asymp").pvalue for name in before])
    checks, drifted = [], False
    for (name, then), p_value in zip(before.items(), p_values, strict=True):
        scale = max(float(then.std()), 1e-12 * max(1.0, float(np.abs(then).max())))
        shift = float(now[name].mean() - then.mean()) / scale
        spread_change = abs(float(now[name].std()) / scale - 1)
        checks.append(DriftCheck(name, float(then.mean()), float(now[name].mean()), shift, float(p_value)))
        drifted |= bool(p_value < level) and max(abs(shift), spread_change) >= _MIN_SHIFT
    return Drift(drifted, tuple(checks), len(reference), len(incoming))


def predictive_checks(
    policy: Policy, predictions: ViewPredictions, labels: LabelSets, *, simulations: int = 200, seed: int = 0
) -> tuple[PredictiveCheck, ...]:
    """Compare the label sets with simulated ones of the same inputs and annotators, one instance of a group."""
    rows = np.random.default_rng(seed).permutation(labels.labelled)
    if predictions.groups is not None:
        rows = rows[np.unique(predictions.groups[rows], return_index=True)[1]]
    rows = np.sort(rows[:_MAX_CHECKED])
    sample, part = labels.take(rows), predictions.take(rows)
    prediction = policy.predict(part)

    def mean(scores: Array) -> float:
        return float(np.average(scores if scores.ndim == 1 else scores.mean(axis=1), weights=sample.count))

    statistics: dict[str, Statistic]
    if isinstance(prediction, CategoricalPrediction):
        n_classes = prediction.proba.shape[1]
        observed = sample.categorical(n_classes, predictions.classes)
        predicted = prediction.proba.argmax(axis=1)[sample.instance]
        statistics = {"share of labels that are the predicted class": lambda value: mean(value == predicted)}
        repeated: dict[str, Statistic] = {"share of pairs of labels that agree": partial(_agreement, sample, n_classes)}
        for c in range(n_classes if n_classes <= 20 else 0):
            statistics[f"frequency of class {prediction.classes[c]}"] = partial(lambda c, value: mean(value == c), c)
    else:
        observed = sample.continuous(prediction.mean.shape[1])
        centre, spread = prediction.mean[sample.instance], np.sqrt(prediction.variance)[sample.instance]
        statistics = {
            "mean residual, in predicted deviations": lambda value: mean((value - centre) / spread),
            "mean squared residual, in predicted variances": lambda value: mean(((value - centre) / spread) ** 2),
            "share of residuals beyond 4 deviations": lambda value: mean(np.abs(value - centre) > 4 * spread),
            "mean cubed residual, in predicted deviations": lambda value: mean(((value - centre) / spread) ** 3),
        }
        repeated = {"spread among the labels of an instance": partial(_within, sample)}
    if (sample.labels_per_instance >= 2).any():
        statistics |= repeated
    draw, generator = _simulator(policy, part, prediction, sample), np.random.default_rng(seed)
    simulated = [draw(generator) for _ in range(simulations)]
    results = []
    for name, statistic in statistics.items():
        value, values = statistic(observed), np.array([statistic(drawn) for drawn in simulated])
        tail = min(1 + (values <= value).sum(), 1 + (values >= value).sum())
        numbers = value, values.mean(), *np.quantile(values, [0.025, 0.975]), min(1.0, 2 * tail / (1 + len(values)))
        results.append(PredictiveCheck(name, *map(float, numbers)))
    return tuple(results)


def prior_sensitivity(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> tuple[Sensitivity, ...]:
    """Changes of the weights when every prior in turn is multiplied by 3 and divided by 3: one fit each."""
    policy, engine, views, sample_labels = _refitted_sample(policy, predictions, labels, 0)
    views = views.select(policy.fitted or policy.names)
    if len(views.names) == 1:
        return ()

    def weights(model: Any) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return quick_fit(Candidate(model, None), engine, 0, InMemory(views, sample_labels)).weights

    reference, noise, changes = weights(policy.model), getattr(policy.model, "noise", None), []
    for prior, factor in product(_PRIORS, (1 / _FACTOR, _FACTOR)):
        value = getattr(policy.model, prior, None)
        if value is not None and _OF_NOISE.get(prior, noise) == noise:
            changed = tuple(factor * entry for entry in value) if isinstance(value, tuple) else factor * value
            refitted = weights(replace(cast("Any", policy.model), **{prior: changed}))
            changes.append(Sensitivity(prior, factor, float(0.5 * np.abs(refitted - reference).sum())))
    return tuple(changes)


def copying_of(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> tuple[Copying, ...]:
    """Pairs of annotators who give the same label more often than two who err independently would."""
    # If a share s of the labels is copied, the probability of the same label is s + (1 - s) p, where p is that of two
    # independent annotators. Hard instances make all pairs agree on errors: a share is tested against the median.
    people = policy.annotators
    if people is None or labels.annotator is None or len(labels.annotator_names) < 3:
        return ()
    agreement = (_same_classes if isinstance(people, AnnotatorAccuracy) else _same_numbers)(policy, predictions, labels)
    rows_of = [np.flatnonzero(labels.annotator == person) for person in range(len(labels.annotator_names))]
    pairs = []
    for a, b in combinations(range(len(rows_of)), 2):
        instances = labels.instance[rows_of[a]], labels.instance[rows_of[b]]
        shared, at_a, at_b = np.intersect1d(*instances, return_indices=True)
        if len(shared) >= _MIN_SHARED:
            pairs.append((a, b, *agreement(rows_of[a][at_a], rows_of[b][at_b])))
    shares = np.array([_copied_share(chance, same) for _, _, chance, same in pairs])
    typical = float(np.median(shares)) if len(shares) >= 3 else 0.0
    ratios = [
        _log_copies(share, chance, same) - _log_copies(typical, chance, same) if share > typical else 0.0
        for share, (_, _, chance, same) in zip(shares, pairs, strict=True)
    ]
    p_values = holm(special.ndtr(-np.sqrt(2 * np.maximum(ratios, 0)))) if pairs else np.zeros(0)
    names = labels.annotator_names
    copying = [
        Copying(names[a], names[b], len(same), float(share), float(p_value))
        for (a, b, _, same), share, p_value in zip(pairs, shares, p_values, strict=True)
    ]
    return tuple(sorted(copying, key=lambda pair: pair.p_value))


def _same_classes(policy: Policy, predictions: ViewPredictions, labels: LabelSets) -> Agreement:
    """The chance p follows from an instance's views and all its labels but the second annotator's."""
    people = cast("AnnotatorAccuracy", policy.annotators)
    proba = np.maximum(cast("CategoricalPrediction", policy.predict(predictions)).proba, np.finfo(np.float64).tiny)
    value = labels.categorical(proba.shape[1], predictions.classes)
    matrices = np.vstack([people.confusion, people.confusion.mean(axis=0)[None]]).swapaxes(1, 2)
    place = annotator_places(people.names, labels)
    likelihood = matrices[place, value]  # (J, C): of every true class
    log_truth = np.log(proba)
    np.add.at(log_truth, labels.instance, np.log(likelihood))

    def agreement(first: Array, second: Array) -> tuple[Array, Array]:
        truth = special.softmax(log_truth[labels.instance[second]] - np.log(likelihood[second]), axis=1)
        return np.vecdot(truth, matrices[place[second], value[first]]), value[first] == value[second]

    return agreement


def _same_numbers(policy: Policy, _: ViewPredictions, labels: LabelSets) -> Agreement:
    """Numbers are the same if equal in all digits; p is the density of their difference times their resolution."""
    people = cast("AnnotatorNoise", policy.annotators)
    value = labels.continuous(people.bias.shape[1])
    resolution = np.array([np.diff(np.unique(column)).min(initial=np.inf) for column in value.T])
    place = np.minimum(annotator_places(people.names, labels), len(people.names) - 1)

    def agreement(first: Array, second: Array) -> tuple[Array, Array]:
        a, b = place[first[0]], place[second[0]]
        spread = np.hypot(people.noise[a], people.noise[b])
        density = np.exp(-0.5 * ((people.bias[a] - people.bias[b]) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
        chance = float(np.minimum(resolution * density, 1).prod())
        return np.full(len(first), chance), (value[first] == value[second]).all(axis=1)

    return agreement


def _log_copies(share: float, chance: Array, same: Array) -> float:
    """Log likelihood that labels are the same (n,) where a share is copied and others agree by chance (n,)."""
    agree = share + (1 - share) * chance
    return float(np.log(np.maximum(np.where(same, agree, 1 - agree), np.finfo(np.float64).tiny)).sum())


def _copied_share(chance: Array, same: Array) -> float:
    """The share of copied labels of maximum likelihood."""
    maximum = optimize.minimize_scalar(lambda share: -_log_copies(share, chance, same), bounds=(0, 1), method="bounded")
    return float(maximum.x)


def annotator_places(names: Sequence[str], labels: LabelSets) -> Array:
    """Position (J,) of every label's annotator in the fit: U for an unknown annotator, 0 if the fit has only one."""
    if len(names) <= 1 or labels.annotator is None:
        return np.full(len(labels), 0 if len(names) <= 1 else len(names))
    known = dict(zip(names, range(len(names)), strict=True))
    return np.array([known.get(name, len(names)) for name in labels.annotator_names])[labels.annotator]


def _agreement(labels: LabelSets, n_classes: int, value: Array) -> float:
    """Share of equal pairs among all pairs of labels of one instance."""
    n_cells = labels.n_instances * n_classes
    counts = np.bincount(labels.instance * n_classes + value, labels.count, n_cells).reshape(-1, n_classes)
    total = counts.sum(axis=1)
    return float((counts * (counts - 1)).sum() / max((total * (total - 1)).sum(), 1e-300))


def _within(labels: LabelSets, value: Array) -> float:
    """Standard deviation of labels around the mean of their instance, pooled over instances and outputs."""
    weight, total = np.bincount(labels.instance, labels.count, labels.n_instances), 0.0
    for column in value.T:
        mean = np.bincount(labels.instance, labels.count * column, labels.n_instances) / np.where(weight > 0, weight, 1)
        total += float((labels.count * (column - mean[labels.instance]) ** 2).sum())
    return float(np.sqrt(total / max(np.maximum(weight - 1, 0).sum() * value.shape[1], 1e-300)))


def _simulator(policy: Policy, predictions: ViewPredictions, prediction: Prediction, labels: LabelSets) -> Draw:
    """A function that draws new labels of the same inputs and annotators: (J,) class positions or (J, C) numbers."""
    people = policy.annotators
    drawn = prediction.take(labels.instance) if people is None else prediction  # labels of an instance share its truth

    def truth(generator: np.random.Generator) -> Array:
        if isinstance(drawn, CategoricalPrediction):
            return draw_positions(generator, drawn.proba)
        return drawn.draw(generator)

    if people is None:
        return truth
    places = annotator_places(people.names, labels)
    if not isinstance(people, AnnotatorNoise):
        assert policy.label_noise is not None
        draw_labels = policy.label_noise.label_sampler(places, labels.instance, predictions.outputs)
        return lambda generator: draw_labels(generator, truth(generator)[labels.instance])
    bias = np.vstack([people.bias, 0 * people.bias[0]])[places]
    scale = np.vstack([people.noise, np.sqrt((people.noise**2).mean(axis=0))])[places]
    return lambda generator: truth(generator)[labels.instance] + (bias + scale * generator.standard_normal(bias.shape))
