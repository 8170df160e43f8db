"""Policy, the outcome of a fit, with its history, the guard's verdict and the choice of views; stacks of policies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_type_hints

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import between, printable
from vbtta._support.files import from_plain, read_json, to_plain, write_json
from vbtta.data.labels import Array, LabelSets, frame_of
from vbtta.data.predictions import Rows, ViewPredictions, conflict, draws_of, keys_of, require_views
from vbtta.distributions import CategoricalPrediction, MultiLabelPrediction, Prediction, merge
from vbtta.inference.advi import N_DRAWS
from vbtta.inference.em import Optimum
from vbtta.inference.laplace import PROFILE_GRID, NoIntervalsError
from vbtta.models import base
from vbtta.models.base import Engine, InMemory, Model, Pooling, Posterior, task_of
from vbtta.models.ordinal.posterior import CutPoints
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.class_data import check_logits
from vbtta.models.parts.gate import Gate
from vbtta.models.parts.label_noise import AnnotatorAccuracy, FittedNoise

_PREDICTED_ENTRIES = 1 << 21  # of rows that are predicted at once: copies of their views stay in the cache


class ConvergenceWarning(UserWarning):
    """A fit stopped before its bound stood still."""


class GuardWarning(UserWarning):
    """The views were worse than the network alone on held-out inputs."""


class History(NamedTuple):
    """How a fit went, one entry an accepted update."""

    elbo: Annotated[Array, "T"]
    weights: Annotated[Array, "T V"]
    other_optima: tuple[Optimum, ...] = ()  # within one nat of the highest, where weights differ; highest first


class Guard(NamedTuple):
    """Whether the views were compared with the raw network on held-out inputs, and what came of it."""

    checked: bool
    fell_back: bool
    difference: float  # held-out log score of the views minus the raw network's, in nats per input
    standard_error: float
    reason: str
    probability: float = 0.5  # that the views help, by the held-out scores


class SelectionPoint(NamedTuple):
    """One set of views and what it is worth."""

    views: tuple[str, ...]
    cost: float
    score: float  # held-out log score, mean over labelled instances
    difference: float  # from the score of all views
    difference_error: float  # standard error of the difference


class Selection(NamedTuple):
    """The choice of views under a budget: cost and quality of nested sets, cheapest first."""

    budget: float
    cost: dict[str, float]  # of every view
    chosen: SelectionPoint
    curve: tuple[SelectionPoint, ...]
    stability: float  # mean Jaccard index of the sets that the folds chose: 1 where they all agree

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row a set of views."""
        return frame_of({name: [getattr(point, name) for point in self.curve] for name in SelectionPoint._fields})


KEPT = 0.01  # a view of less weight counts for little
FILE_KEYS = {"names": "views", "annotator_names": "annotators"}  # of fields that have another name in files
FILE_FIELDS = ("names", "fitted", "generated_names", "n_outputs", "annotator_names", "elbo_terms", "converged",
               "unsupervised", "multilabel", "guard", "selection", "fingerprints", "rows", "history")  # fmt: skip
_UNGUARDED = Guard(False, False, 0.0, 0.0, "not asked for")


class Saved:
    """What is kept in a file of JSON, with its fields or what its `to_dict` returns."""

    _format: ClassVar[tuple[str, str]]  # of the file, and its name in errors

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write human-readable JSON, atomically."""
        write_json(path, self._format[0], 1, to_plain(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str], verify: bool = True) -> Self:
        """Read what :meth:`save` wrote; another format, a newer version or a damaged file is refused.

        With ``verify=False`` the checksum is not compared, so that a file may be edited by hand.
        """
        return read_json(path, cls._format[0], 1, cls._format[1], partial(from_plain, cls), verify)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Policy(Saved):
    """What a fit learned; turns the same views of new inputs into one predictive distribution.

    Attributes
    ----------
    names : tuple of str
        The K views of the fit.
    weights : (K,) array
        Their weights, which sum to 1; averages over the calibration sample where they depend on the input.
    gain : float
        What the weighted average is multiplied by in a latent pool; 1 in a mixture.
    model, engine
        What was assumed and how it was inferred.
    members : tuple of Policy
        The policies whose predictions are averaged, where the policy is a stack; else the policy itself. A stack has no
        bound, history or gain of its own: ask its members.
    member_weights : (M,) array
        Their shares, which sum to 1.
    elbo : float
        The bound at the end (docs/method, eqs. 10 and 24), in the labels' units: below the log evidence of the labels
        where all parameters have a prior that Q covers, else below their penalised log likelihood (temperatures and
        class offsets of EM are at their modes, weights without a concentration at their maximum).
    elbo_terms : dict
        Its terms (docs/method, eq. 11): those that begin with J count as plus, the others as minus.
    converged, unsupervised : bool
        Whether the fit converged, and whether it had no labels.
    history : History
        Bound and weights after each of `n_steps` accepted updates (with ADVI before every step); the first entry has
        uniform weights. `history.other_optima` are those of EM that the data hardly tell from the one taken.
    guard : Guard
        Whether the views were checked against the identity view alone, and what came of it.
    selection : Selection or None
        The cost-quality curve, where views were selected under a budget.
    fingerprints : dict
        By view name, what made the predictions of the fit; predictions made otherwise are refused.
    rows : Rows
        Hashes of the rows of the fit, of 2,048 at most, by which :func:`vbtta.conformalize` recognises them.
    """

    _format = "vbtta-policy", "policy"

    names: tuple[str, ...]
    model: Model
    engine: Engine
    posterior: Posterior
    history: History
    final_elbo: float
    elbo_terms: dict[str, float]
    converged: bool
    n_outputs: int
    classes: Array | None = None
    annotator_names: tuple[str, ...] = ()
    generated_names: bool = False
    fitted: tuple[str, ...] = ()  # the posterior's views, if they are not all
    guard: Guard = _UNGUARDED
    selection: Selection | None = None
    fingerprints: dict[str, str] = field(default_factory=dict, repr=False)
    steps: tuple[Posterior, ...] = field(default=(), repr=False)
    unsupervised: bool = False
    rows: Rows = field(default=Rows(), repr=False)
    multilabel: bool = False  # whether the outputs are labels of which an input may have any number

    def __repr__(self) -> str:
        order = np.argsort(-self.weights, kind="stable")[:6]
        shown = ", ".join(f"{printable(self.names[k])} {self.weights[k]:.3f}" for k in order if self.weights[k] > 0)
        used = int(np.count_nonzero(self.weights))
        shown += ", ..." if used > len(order) else ""
        task = f"unsupervised {self.task}" if self.unsupervised else self.task
        return f"Policy({task}, {self.model_name}, {used} of {len(self.names)} views: {shown})"

    @property
    def model_name(self) -> str:
        """The model's name; of a stack those of its members, with their shares."""
        if not self.stacked:
            return type(self.model).__name__
        names = []
        for share, member in zip(self.member_weights, self.members, strict=True):
            by = {"input": " by input", "view_class": " by class"}.get(getattr(member.model, "weights", ""), "")
            kind = " of identity" if member.fitted == ("identity",) else by
            names.append(f"{share:.2f} {type(member.model).__name__}{kind}")
        return " + ".join(names)

    @property
    def stacked(self) -> bool:
        """Whether the policy averages the predictions of several."""
        return hasattr(self.posterior, "members")

    @property
    def members(self) -> tuple[Policy, ...]:
        """The policies that are stacked; the policy itself where it is no stack."""
        return getattr(self.posterior, "members", (self,))

    @property
    def member_weights(self) -> Array:
        """The shares of the members; a single 1 where the policy is no stack."""
        return getattr(self.posterior, "member_weights", np.ones(1))

    @property
    def elbo(self) -> float:
        """The bound at the end."""
        if self.stacked:
            raise _only_of_members("elbo", self.members)
        return self.final_elbo

    @property
    def task(self) -> str:
        """What the policy predicts: regression, classification, ordinal levels or rankings."""
        return "multilabel" if self.multilabel else task_of(self.model)

    @property
    def weights(self) -> Array:
        """The weights of the views: (K,)."""
        return self._spread(self.posterior.weights)

    @property
    def class_weights(self) -> Array | None:
        """The weights of views and classes (K, C), where the model has them."""
        weights = getattr(self.posterior, "class_weights", None)
        return None if weights is None else self._spread(weights)

    @property
    def gate(self) -> Gate | None:
        """Features, coefficients and their intervals, where weights depend on the input."""
        return getattr(self.posterior, "gate", None)

    def weights_for(self, predictions: ViewPredictions) -> Array:
        """The weights of the views for every input: (N, K), in the order of `names`."""
        self._check(predictions)
        return self._input_weights(predictions)

    def _input_weights(self, predictions: ViewPredictions) -> Array:
        if self.stacked:
            parts = [member._input_weights(predictions) for member in self.members]
            return self._spread(np.einsum("m,mnk->kn", self.member_weights, parts)).T
        weights = self.posterior.weights
        values = np.repeat(weights[:, None], len(predictions), axis=1)
        if self.gate is not None:
            values[weights > 0] = self.gate.weights_for(self._chosen(predictions)).T
        return self._spread(values).T

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by."""
        return self.posterior.gain

    @property
    def n_steps(self) -> int:
        """Number of accepted updates, of all members together."""
        return sum(len(member.history.elbo) for member in self.members)

    @cached_property
    def used_names(self) -> tuple[str, ...]:
        """The views of positive weight, in the order of the fit: those that a prediction needs."""
        return tuple(name for name, weight in zip(self._fitted, self.posterior.weights, strict=True) if weight > 0)

    @property
    def annotators(self) -> AnnotatorNoise | AnnotatorAccuracy | None:
        """What is known of the annotators (bias and noise, or error rates, with intervals); None where not modelled."""
        return self.posterior.describe_annotators(self.annotator_names)

    @property
    def label_noise(self) -> FittedNoise | None:
        """The noise of class labels, where it is modelled."""
        return getattr(self.posterior, "noise", None)

    @property
    def cut_points(self) -> CutPoints:
        """Where one ordered level gives way to the next, in the scores' units; ordinal policies only."""
        return self._of_posterior("cut_points", "task='ordinal'")  # type: ignore[no-any-return]

    def draws(self, size: int = N_DRAWS, seed: int = 0) -> dict[str, Array]:
        """Draws (size, ...) of all parameters by name, in the model's standard units; policies of ADVI only.

        Weights are those of the policy's views: a pruned policy has fewer, which sum to one.
        """
        return self._of_posterior("draws", "engine='advi'")(size, seed)  # type: ignore[no-any-return]

    @np.errstate(over="ignore", divide="ignore", invalid="ignore")
    def weight_interval(self, level: float = 0.9) -> Array:
        """Intervals (K, 2) of the weights at a level; views left out of the fit have [0, 0].

        Of weights that depend on the input they are intervals of the averages over the calibration sample as it is.
        """
        return self._spread(self.posterior.weight_interval(level))

    def to_frame(self, level: float = 0.9) -> Any:
        """A pandas DataFrame with a row a view: weight and the limits of its interval."""
        low, high = self.weight_interval(level).T
        return frame_of({"weight": self.weights, "low": low, "high": high}, index=list(self.names))

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The predictive distribution of every input; needs the views of positive weight, by name."""
        self._check(predictions)
        pooled = self.gate is not None and predictions.groups is not None  # features may be averages over groups
        if task_of(self.model) != "classification" or self.multilabel or pooled or not len(predictions):
            return self._result(self.posterior.predict(self._chosen(predictions)), predictions)
        step = max(1, _PREDICTED_ENTRIES // predictions.outputs[0].size)
        blocks = [slice(first, first + step) for first in range(0, len(predictions), step)]
        parts = [(rows, self.posterior.predict(self._chosen(predictions.take(rows)))) for rows in blocks]
        return self._result(merge(parts, len(predictions)), predictions)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Prediction:
        """The true label of every input from its labels and its views together; one row an input."""
        aligned = self._aligned(predictions, labels)
        self._check(predictions)
        truth = self.posterior.consensus(self._chosen(predictions), aligned, self._people(aligned))
        return self._result(truth, predictions)

    def score(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Array:
        """Log score of every labelled input's label set, noise model included: (N+,); of pairs in multi-label tasks."""
        aligned = self._aligned(predictions, labels)
        self._check(predictions)
        return self.log_scores(InMemory(predictions, aligned))

    def log_scores(self, sample: InMemory) -> Array:
        """:meth:`score` of data that were checked and aligned."""
        return self.posterior.score(self._chosen(sample.predictions), sample.labels, self._people(sample.labels))

    def _aligned(self, predictions: ViewPredictions, labels: Any) -> LabelSets:
        require_views(predictions)
        if not self.multilabel:
            return predictions.align(labels)
        sets = labels if isinstance(labels, LabelSets) else LabelSets.from_multilabel(labels)
        return predictions.as_binary().align(sets)

    def _result(self, prediction: Prediction, predictions: ViewPredictions) -> Prediction:
        """The prediction with the inputs' ids and the policy's classes, in multi-label tasks of C labels at once."""
        if self.multilabel and isinstance(prediction, CategoricalPrediction):
            classes = np.arange(self.n_outputs) if self.classes is None else self.classes
            pairs = prediction.proba[:, 1], prediction.mutual_information
            proba, information = (values.reshape(-1, len(classes)) for values in pairs)
            return MultiLabelPrediction(proba, information, classes, ids=predictions.ids)  # type: ignore[return-value]
        if isinstance(prediction, CategoricalPrediction) and predictions.classes is None and self.classes is not None:
            prediction = replace(prediction, classes=self.classes)
        return replace(prediction, ids=predictions.ids)

    def at_step(self, step: int) -> Self:
        """The policy as it was at entry `step` of the history, from 1; needs ``keep_states=True`` of the engine."""
        if self.stacked:
            raise _only_of_members("at_step", self.members)
        if not self.steps:
            raise ValueError("states were not kept (or not saved); fit with keep_states=True, as EM(keep_states=True)")
        if step not in range(1, len(self.steps) + 1):
            raise ValueError(f"step must be a whole number between 1 and {len(self.steps)}; got {step!r}")
        step = int(step)
        return replace(
            self,
            posterior=self.steps[step - 1],
            history=History(self.history.elbo[:step], self.history.weights[:step]),
            final_elbo=float(self.history.elbo[step - 1]),
            elbo_terms={},
            converged=False,
            steps=self.steps[:step],
        )

    def prune(self, min_weight: float = KEPT) -> Self:
        """The policy without the views of less weight, so that they need not be computed."""
        between("min_weight", min_weight, 0, 1)
        kept = np.flatnonzero(self.posterior.weights >= min_weight)
        if not len(kept):
            raise ValueError(f"min_weight must leave a view; the largest weight is {self.weights.max():.3f}")
        return self.restrict(kept)

    def restrict(self, places: ArrayLike) -> Self:
        """The policy with only some of the views of the fit, by position; their weights sum to one again."""
        kept = np.asarray(places, dtype=np.intp)
        fitted = tuple(self._fitted[k] for k in kept)
        return replace(self, posterior=self.posterior.keep(kept), fitted=fitted, steps=(), elbo_terms={})

    def among(self, names: tuple[str, ...], **changes: Any) -> Self:
        """The policy with `names` as its views, those that it does not know with weight zero; other fields changed."""

        def spread(weights: Array) -> Array:
            return _spread(weights.T, self.names, names).T

        optima = tuple(optimum._replace(weights=spread(optimum.weights)) for optimum in self.history.other_optima)
        history = History(self.history.elbo, spread(self.history.weights), optima)
        return replace(self, names=names, fitted=self.fitted or self.names, history=history, **changes)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write a folder as the Hugging Face Hub has it: the policy and a model card.

        Options are `predictions` and `labels` (held out, on which calibration is shown), and the card's `data` and
        `limits`.
        """
        self._on_hub("save_pretrained", folder, options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hugging Face Hub what :meth:`save_pretrained` writes; options are its own and the Hub's."""
        return str(self._on_hub("push_to_hub", repo_id, options))

    @classmethod
    def from_pretrained(cls, repo_or_folder: str | os.PathLike[str], **options: Any) -> Policy:
        """Read what :meth:`save_pretrained` or :meth:`push_to_hub` wrote; options are those of `hf_hub_download`."""
        hub: Any = import_module("vbtta.integrations.huggingface")
        return hub.from_hub(os.fspath(repo_or_folder), **options)  # type: ignore[no-any-return]

    def _on_hub(self, method: str, where: Any, options: dict[str, Any]) -> Any:
        texts = {name: options.pop(name) for name in ("data", "limits") if name in options}
        held_out = {name: options.pop(name, None) for name in ("predictions", "labels")}
        hub = import_module("vbtta.integrations.huggingface").hub_policy()(self, **held_out)
        return getattr(hub, method)(where, model_card_kwargs=texts, **options)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data for JSON."""
        names = (*FILE_FIELDS, "classes", "posterior")
        data = {FILE_KEYS.get(name, name): to_plain(getattr(self, name)) for name in names}
        data |= {"model": base.record_to_dict(self.model), "engine": base.record_to_dict(self.engine)}
        elbo = None if self.stacked else self.final_elbo
        return {"task": self.task, "weights": to_plain(self.weights), "elbo": elbo, **data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The policy that :meth:`to_dict` described; raises ValueError or KeyError where data are damaged."""
        model, engine = base.record_from_dict(data["model"]), base.record_from_dict(data["engine"])
        multilabel, stacked = from_plain(bool, data["multilabel"]), model.as_stack() is not None
        if data["task"] != ("multilabel" if multilabel else task_of(model)):
            raise ValueError(f"its task is {data['task']!r}, and that of its model {task_of(model)!r}")
        names, fitted = (from_plain(tuple[str, ...], data[key]) for key in ("views", "fitted"))
        if not names or any(len(set(group)) < len(group) for group in (names, fitted)) or not set(fitted) <= set(names):
            raise ValueError("its views are not distinct, or it was fitted to others")
        n_outputs = from_plain(int, data["n_outputs"])
        if n_outputs < 1 or (data["task"] == "ordinal" and n_outputs > 1):
            raise ValueError(f"n_outputs is {n_outputs}")
        sizes = {"K": len(fitted or names), "C": 2 if multilabel else n_outputs, "V": len(names)}
        sizes["G"] = len(PROFILE_GRID)
        elbo = from_plain(float | None if stacked else float, data["elbo"])
        kinds = get_type_hints(cls, include_extras=True)
        read = {name: from_plain(kinds[name], data[FILE_KEYS.get(name, name)], sizes) for name in FILE_FIELDS}
        posterior = _read_posterior(model, engine, data["posterior"], sizes)
        classes = None if data["classes"] is None else keys_of(data["classes"], n_outputs, "classes")
        read |= {"final_elbo": np.nan if elbo is None else elbo, "classes": classes}
        policy = cls(model=model, engine=engine, posterior=posterior, **read)
        stated = from_plain(Annotated[Array, "V"], data["weights"], sizes)
        if not np.allclose(stated, policy.weights, atol=1e-9):
            raise ValueError("its weights disagree with its posterior")
        for weights in (stated, policy.class_weights):
            if weights is not None and ((weights < 0).any() or np.abs(weights.sum(axis=0) - 1).max() > 1e-6):
                raise ValueError("its weights are not shares: positive, with sum 1")
        policy._try_out()
        return policy

    def _try_out(self) -> None:
        """Use the policy with one input and its labels, so that a damaged posterior is found when it is read."""
        names, extra = self.used_names, self.gate.features.given if self.gate else ()  # of views and of features
        n_outputs = 2 if self.multilabel else self.n_outputs
        if self.task in ("ordinal", "ranking"):  # no arrays are of this size, which may be wrong and large
            n_outputs = min(n_outputs, 9)
        zeros, features = np.zeros((1, len(names), n_outputs)), np.zeros((1, len(names), len(extra)))
        with np.errstate(all="ignore"):
            inputs = ViewPredictions(zeros, zeros, names=names, features=features, feature_names=extra, groups=[0])
            prediction: Any = self.posterior.predict(inputs)
            if not _proper(prediction):
                raise ValueError("its posterior does not predict")
            labels, annotator = self._likely_labels(prediction)
            if not _proper(self.posterior.consensus(inputs, labels, annotator)):
                raise ValueError("its posterior has no consensus")
            numbers: dict[str, Any] = {
                "scores of labels": [self.posterior.score(inputs, labels, annotator)],
                "annotators": () if self.annotators is None else self.annotators[1:],
                "cut points": self.cut_points if self.task == "ordinal" else (),
                "draws": self.draws(2).values() if hasattr(self.posterior, "draws") else (),
            }
            with suppress(NoIntervalsError):
                numbers["intervals of weights"] = [self.weight_interval()]
        for name, arrays in numbers.items():
            if not all(np.isfinite(array).all() for array in arrays):
                raise ValueError(f"its {name} are damaged")

    def _likely_labels(self, prediction: Any) -> tuple[LabelSets, Array]:
        """The predicted label of one input, given by an unknown and by the last annotator, and their positions."""
        if self.task == "ranking":
            labels = LabelSets.from_rankings([np.argsort(-prediction.proba[0])])
        elif hasattr(prediction, "proba"):
            labels = LabelSets.from_array(prediction.classes[prediction.proba.argmax(axis=1)])
        else:
            labels = LabelSets.from_array(prediction.mean[:, None])
        annotator = np.array([-1, len(self.annotator_names) - 1] if self.annotator_names else [0])
        again = np.zeros(len(annotator), dtype=np.intp)
        return replace(labels, instance=again, value=labels.value[again], count=labels.count[again]), annotator

    def _of_posterior(self, name: str, needed: str) -> Any:
        """What some posteriors have and others have not."""
        if not hasattr(self.posterior, name):
            raise ValueError(f"a policy has {name} only with {needed}; this one is {self!r}")
        return getattr(self.posterior, name)

    @property
    def _fitted(self) -> tuple[str, ...]:
        return self.fitted or self.names

    def _spread(self, values: Array) -> Array:
        """Values of the fitted views (first axis), with zeros for the others."""
        return _spread(values, self._fitted, self.names)

    def _chosen(self, predictions: ViewPredictions) -> ViewPredictions:
        """The views of positive weight, matched by name, of predictions that were checked."""
        chosen = predictions.as_binary() if self.multilabel else predictions
        if not self.stacked:  # the members of a stack choose theirs
            chosen = chosen.select(self.used_names)
        if isinstance(chosen.outputs, np.memmap):
            chosen.check_finite()  # a mapped file was not checked when it was opened
        return chosen

    def _check(self, predictions: ViewPredictions) -> None:
        """Refuse predictions that do not have the views of positive weight, as they were fitted."""
        require_views(predictions)
        if (n_outputs := predictions.outputs.shape[2]) != self.n_outputs:
            raise ValueError(f"predictions have {n_outputs} outputs but the policy was fitted to {self.n_outputs}")
        if self.task == "classification":
            check_logits(predictions, fitted=True)
        both = predictions.classes is not None and self.classes is not None
        if both and not np.array_equal(np.asarray(predictions.classes, str), np.asarray(self.classes, str)):
            raise ValueError("predictions have other classes than the policy was fitted to, or in another order")
        if self.generated_names != predictions.generated_names:
            with_names, without = ("predictions", "policy") if self.generated_names else ("policy", "predictions")
            raise ValueError(
                f"the views of the {with_names} have names and those of the {without} have not; name them with "
                "ViewPredictions(names=...)"
            )
        if self.generated_names and len(predictions.names) != len(self.names):
            raise ValueError(
                f"predictions have {len(predictions.names)} unnamed views but the policy was fitted to "
                f"{len(self.names)}; name the views so that they can be matched"
            )
        if missing := [name for name in self.used_names if name not in predictions.names]:
            raise ValueError(f"the policy needs the views {missing}, which the predictions lack")
        redrawn = None
        for name in self.used_names:
            of_fit, of_input = self.fingerprints.get(name, ""), predictions.fingerprints.get(name, "")
            if (difference := conflict(of_fit, of_input)) is not None:
                raise ValueError(
                    f"view {name!r} of the predictions is not the one the policy was fitted to: it {difference}; "
                    "collect the views as for the fit, or fit again"
                )
            draws, drawn = draws_of(of_fit), draws_of(of_input)
            if None not in (draws, drawn) and draws != drawn:
                redrawn = redrawn or (draws, name, drawn)
        if redrawn:  # views drawn more often are steadier
            warnings.warn(
                "the policy was fitted to {} draws of view {!r} and gets {}; weights and uncertainty hold for the "
                "former: collect with draws={}".format(*redrawn, redrawn[0]),
                stacklevel=3,
            )

    def _people(self, labels: LabelSets) -> Array:
        """The position of every label's annotator in the fit; -1 for unknown annotators."""
        if labels.annotator is None:
            return np.full(len(labels), -1 if self.annotator_names else 0, dtype=np.intp)
        known = {name: place for place, name in enumerate(self.annotator_names)}
        return np.array([known.get(name, -1) for name in labels.annotator_names], dtype=np.intp)[labels.annotator]


@dataclass(frozen=True, eq=False)
class StackedPosterior(Posterior):
    """Policies of the same views whose predictive distributions are averaged (docs/method, "Stacking").

    The label set of an input speaks for the members that predicted it: given labels, a member's share is its weight
    times the probability that it gave them.
    """

    members: tuple[Policy, ...]
    member_weights: Array  # (M,)
    covariance: Array  # (M, M) of the member weights

    @property
    def weights(self) -> Array:
        """Total weights of the views: (K,)."""
        return np.asarray(self.member_weights @ [member.weights for member in self.members])

    @property
    def gain(self) -> float:
        """A stack has none."""
        raise _only_of_members("gain", self.members)

    def pooling(self) -> Pooling:
        """A stack has one a member."""
        raise _only_of_members("pooling", self.members)

    @property
    def noise(self) -> FittedNoise | None:
        """As the heaviest member has it that infers it by itself."""
        return self._informant.label_noise

    @property
    def gate(self) -> Gate | None:
        """That of the heaviest member that has one."""
        gates = (self.members[m].gate for m in np.argsort(-self.member_weights))
        return next((gate for gate in gates if gate is not None), None)

    @property
    def _informant(self) -> Policy:
        """The heaviest member, if possible one whose prior of the noise is not the raw network's posterior."""
        own = np.array([getattr(member.model, "accuracy_prior", None) is None for member in self.members])
        return self.members[int((self.member_weights + own).argmax())]

    def weight_interval(self, level: float) -> Array:
        """Intervals (K, 2) of the total weights.

        Distances to the members' limits are averaged, since the members saw the same labels; those of the members'
        weights, from their covariance, are added in squares (method of variance estimates recovery, Zou and Donner).
        """
        by_member = np.stack([member.weights for member in self.members])  # (M, K)
        limits = np.stack([member.weight_interval(level) for member in self.members])  # (M, K, 2)
        normal_quantile = special.ndtri(0.5 + 0.5 * level)
        variance = np.einsum("mk,mn,nk->k", by_member, self.covariance, by_member)
        spread = normal_quantile**2 * np.maximum(variance, 0)  # by rounding below 0 where members agree
        distance = np.einsum("m,mkl->kl", self.member_weights, limits - by_member[:, :, None])
        away = np.sqrt(distance**2 + spread[:, None])
        return np.asarray(np.clip(self.weights[:, None] + away * [-1.0, 1.0], 0, 1))

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The average of the members' predictive distributions."""
        parts: list[Any] = [part.predict(views) for part, views in self._parts(predictions)]
        return type(parts[0]).pool(parts, np.tile(self.member_weights, (len(predictions), 1)))  # type: ignore[no-any-return]

    def _parts(self, predictions: ViewPredictions) -> list[tuple[Posterior, ViewPredictions]]:
        """The members' posteriors with their views."""
        return [(member.posterior, predictions.select(member.used_names)) for member in self.members]

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Prediction:
        """The average of the members' consensus, those that predicted the labels better weighing more."""
        parts: list[Any] = [part.consensus(views, labels, annotator) for part, views in self._parts(predictions)]
        shares = np.tile(self.member_weights, (len(predictions), 1))
        shares[labels.labelled] = special.softmax(self._log_joint(predictions, labels, annotator)[0], axis=1)
        return type(parts[0]).pool(parts, shares)  # type: ignore[no-any-return]

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set: (N+,)."""
        joint, importance = self._log_joint(predictions, labels, annotator)
        return np.asarray(importance * special.logsumexp(joint, axis=1))

    def _log_joint(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> tuple[Array, Array]:
        """Log of weight times probability of the labels (N+, M), and the weights of the instances (N+,)."""
        rows = labels.labelled
        importance = np.ones(len(rows)) if labels.instance_weights is None else labels.instance_weights[rows]
        scores = [part.score(views, labels, annotator) for part, views in self._parts(predictions)]
        return np.stack(scores, axis=1) / importance[:, None] + np.log(self.member_weights), importance

    def keep(self, views: Array) -> Posterior:
        """The same with only some of the views; members that use none of them go."""
        names = tuple(self.members[0].names[k] for k in views)
        places = [place for place, member in enumerate(self.members) if set(member.used_names) & set(names)]
        members = [self.members[place] for place in places]
        known = [[k for k, name in enumerate(member._fitted) if name in names] for member in members]
        kept = tuple(member.restrict(k).among(names) for member, k in zip(members, known, strict=True))
        weights = self.member_weights[places]
        covariance = self.covariance[np.ix_(places, places)] / weights.sum() ** 2
        return StackedPosterior(kept, weights / weights.sum(), covariance)

    def describe_annotators(self, names: tuple[str, ...]) -> AnnotatorNoise | AnnotatorAccuracy | None:
        """What the heaviest member that infers the noise by itself knows of the annotators."""
        return self._informant.posterior.describe_annotators(names)


def stack_policies(
    model: Model, engine: Engine, members: Sequence[Policy], weights: Array, covariance: Array, guard: Guard
) -> Policy:
    """The stack of policies of the same views; members of little weight are dropped, and one alone is just that one."""
    kept = np.flatnonzero(weights >= KEPT).tolist()
    if len(kept) == 1:
        return replace(members[kept[0]], guard=guard)
    shares = weights[kept] / weights[kept].sum()
    posterior = StackedPosterior(tuple(members[m] for m in kept), shares, covariance[np.ix_(kept, kept)])
    return replace(
        members[0],
        model=model,
        engine=engine,
        posterior=posterior,
        history=History(np.zeros(0), np.zeros((0, len(members[0].names)))),
        final_elbo=np.nan,
        elbo_terms={},
        converged=all(member.converged for member in posterior.members),
        fitted=(),
        guard=guard,
        fingerprints={name: text for member in members for name, text in member.fingerprints.items()},
        steps=(),
    )


def _spread(values: Array, names: tuple[str, ...], among: tuple[str, ...]) -> Array:
    """Values of some views (first axis) as those of others, with zeros for views that had none."""
    if names == among:
        return values
    spread = np.zeros((len(among), *values.shape[1:]))
    places = [(among.index(name), place) for place, name in enumerate(names) if name in among]
    spread[[to for to, _ in places]] = values[[place for _, place in places]]
    return spread


def _proper(prediction: Any) -> bool:
    """Whether there are probabilities of distinct classes, or means and variances."""
    if not hasattr(prediction, "proba"):
        spread = prediction.variance
        return bool(np.isfinite(prediction.mean).all() and np.all(np.isfinite(spread) & (spread >= 0)))
    proba, classes = prediction.proba, prediction.classes.tolist()
    return bool(np.all(np.isfinite(proba) & (proba >= 0)) and len(set(classes)) == len(classes) == proba.shape[1])


def _read_posterior(model: Model, engine: Engine, data: dict[str, Any], sizes: dict[str, int]) -> Any:
    """The posterior that a policy's file describes."""
    if not model.as_stack():
        posterior = from_plain(base.posterior_type(model, engine), data, sizes)
        tail = getattr(getattr(posterior, "state", None), "tail", None)
        if tail is not None and bool(tail) != (getattr(model, "component", "") == "student_t"):
            raise ValueError(f"tail: {tail} degrees of freedom do not go with the component of its model")
        return posterior
    members = tuple(Policy.from_dict(member) for member in data["members"])
    sizes = {**sizes, "M": len(members)}
    weights = from_plain(Annotated[Array, "M"], data["member_weights"], sizes)
    covariance = from_plain(Annotated[Array, "M M"], data["covariance"], sizes)
    if any(member.multilabel or member.n_outputs != sizes["C"] for member in members):
        raise ValueError("its members have other outputs")
    if (weights <= 0).any() or abs(weights.sum() - 1) > 1e-6 or len({member.names for member in members}) > 1:
        raise ValueError("its members' weights are not positive shares, or their views differ")
    if not np.allclose(covariance, covariance.T) or np.linalg.eigvalsh(covariance)[0] < -1e-9:
        raise ValueError("the covariance of its members' weights is none")
    return StackedPosterior(members, weights, covariance)


def _only_of_members(name: str, members: tuple[Policy, ...]) -> ValueError:
    kinds = ", ".join(type(member.model).__name__ for member in members)
    return ValueError(f"a stack has no {name} of its own; ask policy.members: {kinds}")
