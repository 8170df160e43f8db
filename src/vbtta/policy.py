"""What comes with a policy: its history, the guard's verdict, the choice of views; and what a fit warns of."""

from __future__ import annotations

__all__ = [
    "KEPT",
    "ConvergenceWarning",
    "Guard",
    "GuardWarning",
    "History",
    "Policy",
    "Selection",
    "SelectionPoint",
    "StackedPosterior",
    "stack_policies",
]

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from vbtta._support.checks import between, printable
from vbtta._support.files import from_plain, read_json, to_plain, write_json
from vbtta._support.fingerprints import Rows, conflict, draws_of
from vbtta.data.labels import Array, LabelSets, frame_of
from vbtta.data.predictions import ViewPredictions
from vbtta.distributions import CategoricalPrediction, MultiLabelPrediction, Prediction
from vbtta.inference.guide import N_DRAWS
from vbtta.inference.laplace import PROFILE_GRID
from vbtta.models.base import (
    Engine,
    Model,
    Pooling,
    Posterior,
    posterior_type,
    record_from_dict,
    record_to_dict,
    task_of,
)
from vbtta.models.ordinal.posterior import CutPoints
from vbtta.models.parts.annotators import AnnotatorNoise
from vbtta.models.parts.gate import Gate
from vbtta.models.parts.label_noise import AnnotatorAccuracy, FittedNoise


class ConvergenceWarning(UserWarning):
    """A fit stopped before its bound stood still.

    Examples
    --------
    >>> import warnings
    >>> import numpy as np
    >>> from vbtta import EM, ConvergenceWarning, ViewPredictions, fit_policy
    >>> views = np.random.default_rng(0).normal(size=(200, 3, 1))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", ConvergenceWarning)
    ...     policy = fit_policy(
    ...         ViewPredictions(views), views[:, 0, 0], task="regression", model="mixture", engine=EM(max_steps=2)
    ...     )
    >>> print(caught[0].message)
    GaussianMixture did not converge in 2 steps; raise EM(max_steps=...) or tol
    >>> policy.converged
    False
    """


class GuardWarning(UserWarning):
    """The views were worse than the network alone on held-out inputs.

    Examples
    --------
    Eight views of noise, and too few labels to see that they are:

    >>> import warnings
    >>> import numpy as np
    >>> from vbtta import GuardWarning, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(3)
    >>> truth = rng.normal(size=15)
    >>> views = np.hstack([truth[:, None] + 0.1 * rng.normal(size=(15, 1)), rng.normal(size=(15, 8))])
    >>> predictions = ViewPredictions(views[:, :, None], names=["identity", *"abcdefgh"])
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", GuardWarning)
    ...     policy = fit_policy(predictions, truth, task="regression", model="mixture", guard="hard")
    >>> [warning.category.__name__ for warning in caught], policy.guard.fell_back
    (['GuardWarning'], True)
    """


class History(NamedTuple):
    """How a fit went, one entry an accepted update."""

    elbo: Annotated[Array, "T"]
    weights: Annotated[Array, "T V"]


class Guard(NamedTuple):
    """Whether the views were compared with the raw network on held-out inputs, and what came of it."""

    checked: bool
    fell_back: bool
    difference: float  # held-out log score of the views minus the raw network's, in nats per input
    standard_error: float
    reason: str
    probability: float = 0.5  # that the views help, as far as the held-out scores tell


class SelectionPoint(NamedTuple):
    """One set of views and what it is worth."""

    views: tuple[str, ...]
    cost: float
    score: float  # held-out log score, mean over labelled instances
    difference: float  # from the score of all views
    standard_error: float  # of the difference


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
_FORMAT, _VERSION = "vbtta-policy", 1


_UNGUARDED = Guard(False, False, 0.0, 0.0, "not asked for")


@dataclass(frozen=True, eq=False)
class Policy:
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
        The policies whose predictions are averaged, where the policy is a stack; else empty. A stack has no bound,
        history or gain of its own: ask its members.
    member_weights : (M,) array
        Their shares, which sum to 1.
    elbo : float
        The bound at the end (docs/method, eqs. 10 and 24), in the labels' units: below the log evidence of the labels
        where all parameters have a prior that Q covers, else below their penalised log likelihood (temperatures and
        class offsets of EM are at their modes, weights without a concentration at their maximum).
    elbo_terms : dict
        Its terms (docs/method, eq. 11): those that begin with J count as plus, the others as minus.
    converged : bool
    n_steps : int
    history : History
        Bound and weights after every accepted update (with ADVI before every step); the first entry has uniform
        weights.
    guard : Guard
        Whether the views were checked against the identity view alone, and what came of it.
    selection : Selection or None
        The cost-quality curve, where views were selected under a budget.
    unsupervised : bool
        Whether the weights were inferred without labels.
    fingerprints : dict
        By view name, what made the predictions of the fit; predictions made otherwise are refused.
    rows : Rows
        Hashes of the rows of the fit, of 2,048 at most, by which :func:`vbtta.conformalize` recognises them.

    Examples
    --------
    >>> from vbtta import ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=200)
    >>> views = truth[:, None] + rng.normal(size=(200, 2)) * [0.1, 2.0]
    >>> predictions = ViewPredictions(views[:, :, None], names=["identity", "noise"])
    >>> policy = fit_policy(predictions, truth, task="regression", model="mixture", guard=False)
    >>> policy
    Policy(regression, GaussianMixture, 1 of 2 views: identity 1.000)
    >>> found = policy.predict(predictions.select(["identity"]))  # views of no weight need not be computed
    >>> found.mean.shape, found.interval(0.9)[0].shape
    ((200, 1), (200, 1))
    """

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
    fitted: tuple[str, ...] = ()  # the views the posterior knows, where they are not all
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
        if not self.members:
            return type(self.model).__name__
        return " + ".join(
            f"{share:.2f} {type(member.model).__name__}{' of identity' if member.fitted == ('identity',) else ''}"
            for member, share in zip(self.members, self.member_weights, strict=True)
        )

    @property
    def members(self) -> tuple[Policy, ...]:
        """The policies that are stacked; none unless the policy is a stack."""
        return getattr(self.posterior, "members", ())

    @property
    def member_weights(self) -> Array:
        """The shares of the members; a single 1 where the policy is no stack."""
        return getattr(self.posterior, "member_weights", np.ones(1))

    @property
    def heaviest_member(self) -> Policy:
        """The member of most weight; the policy itself where it is no stack."""
        return self.members[int(self.member_weights.argmax())] if self.members else self

    @property
    def elbo(self) -> float:
        """The bound at the end."""
        self._refuse_stack("elbo")
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
        found = getattr(self.posterior, "class_weights", None)
        return None if found is None else self._spread(found)

    @property
    def gate(self) -> Gate | None:
        """Features, coefficients and their intervals, where weights depend on the input."""
        return getattr(self.posterior, "gate", None)

    def weights_for(self, predictions: ViewPredictions) -> Array:
        """The weights of the views for every input: (N, K)."""
        if self.members:
            parts = [member.weights_for(predictions) for member in self.members]
            return self._spread(np.einsum("m,mnk->kn", self.member_weights, parts)).T
        chosen, weights = self._views(predictions), self.posterior.weights
        values = np.repeat(weights[:, None], len(predictions), axis=1)
        if self.gate is not None:
            values[weights > 0] = self.gate.weights_for(chosen).T
        return self._spread(values).T

    @property
    def gain(self) -> float:
        """What the weighted average is multiplied by."""
        return self.posterior.gain

    @property
    def n_steps(self) -> int:
        """Number of accepted updates, of all members together."""
        return len(self.history.elbo) + sum(member.n_steps for member in self.members)

    @property
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
        """Draws (size, ...) of all parameters by name, in the model's standard units; policies of ADVI only."""
        return self._of_posterior("draws", "engine='advi'")(size, seed)  # type: ignore[no-any-return]

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
        return self._result(self.posterior.predict(self._views(predictions)), predictions)

    def consensus(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Prediction:
        """The true label of every input from its labels and its views together; one row an input."""
        aligned = self._aligned(predictions, labels)
        truth = self.posterior.consensus(self._views(predictions), aligned, self._people(aligned))
        return self._result(truth, predictions)

    def score(self, predictions: ViewPredictions, labels: LabelSets | ArrayLike) -> Array:
        """Log score of every labelled input's label set, noise model included: (N+,); of pairs in multi-label tasks."""
        aligned = self._aligned(predictions, labels)
        return self.posterior.score(self._views(predictions), aligned, self._people(aligned))

    def _aligned(self, predictions: ViewPredictions, labels: Any) -> LabelSets:
        if not self.multilabel:
            return predictions.align(labels)
        sets = labels if isinstance(labels, LabelSets) else LabelSets.from_multilabel(labels)
        return predictions.as_binary().align(sets)

    def _result(self, prediction: Prediction, predictions: ViewPredictions) -> Prediction:
        """The prediction with the policy's classes, in multi-label tasks of C labels at once."""
        if not isinstance(prediction, CategoricalPrediction):
            return prediction
        if not self.multilabel:
            if predictions.classes is not None or self.classes is None:
                return prediction
            return CategoricalPrediction(prediction.proba, prediction.mutual_information, self.classes)
        classes = np.arange(self.n_outputs) if self.classes is None else self.classes
        return MultiLabelPrediction.of(prediction, classes)  # type: ignore[return-value]

    def at_step(self, step: int) -> Self:
        """The policy as it was at entry `step` of the history, from 1; needs ``keep_states=True`` of the engine."""
        self._refuse_stack("at_step")
        if not self.steps:
            raise ValueError(
                "states were not kept (or not saved); fit with keep_states=True, as in EM(keep_states=True)"
            )
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
        weights = np.zeros((len(self.history.weights), len(names)))
        known = [name for name in names if name in self.names]
        columns = [self.names.index(name) for name in known]
        weights[:, [names.index(name) for name in known]] = self.history.weights[:, columns]
        history = self.history._replace(weights=weights)
        return replace(self, names=names, fitted=self.fitted or self.names, history=history, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as human-readable JSON, atomically."""
        write_json(path, _FORMAT, _VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str], verify: bool = True) -> Self:
        """Read what :meth:`save` wrote; another format, a newer version or a damaged file is refused.

        With ``verify=False`` the checksum is not compared, so that a file may be edited by hand.
        """
        return read_json(path, _FORMAT, _VERSION, "policy", cls.from_dict, verify)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write a folder as the Hugging Face Hub has it: the policy and a model card.

        Options are `predictions` and `labels` (held out, on which calibration is shown), and `data` and `limits`, texts
        for the card.
        """
        self._on_hub("save_pretrained", folder, options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to a repository of the Hugging Face Hub what :meth:`save_pretrained` writes, with its options.

        Other options, such as `private` and `token`, are those of ``huggingface_hub.ModelHubMixin.push_to_hub``.
        """
        return str(self._on_hub("push_to_hub", repo_id, options))

    @classmethod
    def from_pretrained(cls, repo_or_folder: str | os.PathLike[str], **options: Any) -> Policy:
        """Read what :meth:`save_pretrained` or :meth:`push_to_hub` wrote; options are those of `huggingface_hub`."""
        hub = import_module("vbtta.integrations.huggingface").hub_policy()
        policy: Policy = hub.from_pretrained(os.fspath(repo_or_folder), **options).policy
        return policy

    def _on_hub(self, method: str, where: Any, options: dict[str, Any]) -> Any:
        texts = {name: options.pop(name) for name in ("data", "limits") if name in options}
        held_out = {name: options.pop(name, None) for name in ("predictions", "labels")}
        hub = import_module("vbtta.integrations.huggingface").hub_policy()(self, **held_out)
        return getattr(hub, method)(where, model_card_kwargs=texts, **options)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data for JSON."""
        return {
            "task": self.task,
            "views": list(self.names),
            "weights": to_plain(self.weights),
            "generated_names": self.generated_names,
            "fitted": list(self.fitted),
            "n_outputs": self.n_outputs,
            "classes": to_plain(self.classes),
            "annotators": list(self.annotator_names),
            "model": record_to_dict(self.model),
            "engine": record_to_dict(self.engine),
            "elbo": None if self.members else self.final_elbo,
            "elbo_terms": self.elbo_terms,
            "converged": self.converged,
            "unsupervised": self.unsupervised,
            "multilabel": self.multilabel,
            "guard": to_plain(self.guard),
            "selection": to_plain(self.selection),
            "fingerprints": self.fingerprints,
            "rows": to_plain(self.rows),
            "posterior": to_plain(self.posterior),
            "history": to_plain(self.history),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The policy that :meth:`to_dict` described; raises ValueError or KeyError where data are damaged."""
        model, engine = record_from_dict(data["model"]), record_from_dict(data["engine"])
        multilabel = from_plain(bool, data.get("multilabel", False))
        if data["task"] != ("multilabel" if multilabel else task_of(model)):
            raise ValueError(f"its task is {data['task']!r}, and that of its model {task_of(model)!r}")
        names, fitted = (from_plain(tuple[str, ...], data[key]) for key in ("views", "fitted"))
        if not names or any(len(set(group)) < len(group) for group in (names, fitted)) or not set(fitted) <= set(names):
            raise ValueError("its views are not distinct, or it was fitted to others")
        n_outputs = from_plain(int, data["n_outputs"])
        if n_outputs < 1:
            raise ValueError(f"n_outputs is {n_outputs}")
        sizes = {
            "K": len(fitted or names),
            "C": 2 if multilabel else n_outputs,
            "V": len(names),
            "G": len(PROFILE_GRID),
        }
        policy = cls(
            names=names,
            model=model,
            engine=engine,
            posterior=_read_posterior(model, engine, data["posterior"], sizes),
            history=from_plain(History, data["history"], sizes),
            final_elbo=np.nan if model.as_stack() else from_plain(float, data["elbo"]),
            elbo_terms={name: from_plain(float, value) for name, value in data["elbo_terms"].items()},
            converged=from_plain(bool, data["converged"]),
            n_outputs=n_outputs,
            classes=_read_classes(data["classes"], n_outputs),
            annotator_names=from_plain(tuple[str, ...], data["annotators"]),
            generated_names=from_plain(bool, data["generated_names"]),
            fitted=fitted,
            unsupervised=from_plain(bool, data.get("unsupervised", False)),
            multilabel=multilabel,
            guard=from_plain(Guard, data["guard"]),
            selection=from_plain(Selection | None, data["selection"]),
            fingerprints={name: from_plain(str, text) for name, text in data.get("fingerprints", {}).items()},
            rows=from_plain(Rows, data["rows"]) if "rows" in data else Rows(),
        )
        stated = from_plain(Annotated[Array, "V"], data["weights"], sizes)
        if not np.allclose(stated, policy.weights, atol=1e-9):
            raise ValueError("its weights disagree with its posterior")
        if (stated < 0).any() or abs(stated.sum() - 1) > 1e-6:
            raise ValueError("its weights are not shares: positive, with sum 1")
        policy._try_out()
        return policy

    def _try_out(self) -> None:
        """Predict one input, so that a damaged posterior is found when it is read."""
        names, given = self.used_names, self.gate.features.given if self.gate else ()
        # levels and rankings have no arrays of the size of the outputs, which may be wrong and large
        n_outputs = self.n_outputs if self.task in ("regression", "classification") else min(self.n_outputs, 9)
        n_outputs = 2 if self.multilabel else n_outputs
        zeros, features = np.zeros((1, len(names), n_outputs)), np.zeros((1, len(names), len(given)))
        with np.errstate(all="ignore"):
            inputs = ViewPredictions(zeros, zeros, names=names, features=features, feature_names=given)
            found = self.posterior.predict(inputs)
            numbers = getattr(found, "proba", None)
            numbers = found.variance if numbers is None else numbers  # type: ignore[union-attr]
            people = self.annotators
        if not np.all(np.isfinite(numbers) & (numbers >= 0)):
            raise ValueError("its posterior does not predict")
        if people is not None and not all(np.isfinite(part).all() for part in people[1:]):
            raise ValueError("its annotators are damaged")

    def _refuse_stack(self, name: str) -> None:
        if self.members:
            raise _only_of_members(name, self.members)

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
        if self._fitted == self.names:
            return values
        spread = np.zeros((len(self.names), *values.shape[1:]))
        spread[[self.names.index(name) for name in self._fitted]] = values
        return spread

    def _views(self, predictions: ViewPredictions) -> ViewPredictions:
        """The views of positive weight, matched by name."""
        if not isinstance(predictions, ViewPredictions):
            raise TypeError(
                f"predictions must be ViewPredictions; got {type(predictions).__name__}. Wrap the (N, K, C) array"
            )
        if predictions.outputs.shape[2] != self.n_outputs:
            raise ValueError(
                f"predictions have {predictions.outputs.shape[2]} outputs but the policy was fitted to {self.n_outputs}"
            )
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
        needed = self.used_names
        missing = [name for name in needed if name not in predictions.names]
        if missing:
            raise ValueError(f"the policy needs the views {missing}, which the predictions lack")
        for name in needed:
            what = conflict(self.fingerprints.get(name, ""), predictions.fingerprints.get(name, ""))
            if what is not None:
                raise ValueError(
                    f"view {name!r} of the predictions is not the one the policy was fitted to: it {what}; collect "
                    f"the views as for the fit, or fit again"
                )
        self._compare_draws({name: predictions.fingerprints.get(name, "") for name in needed})
        chosen = (predictions.as_binary() if self.multilabel else predictions).select(needed)
        if isinstance(chosen.outputs, np.memmap):
            chosen.check_finite()  # a mapped file was not checked when it was opened
        return chosen

    def _compare_draws(self, found: dict[str, str]) -> None:
        """Warn where views were drawn more often or more rarely than for the fit: they are steadier or noisier."""
        for name, text in found.items():
            then, now = draws_of(self.fingerprints.get(name, "")), draws_of(text)
            if then is not None and now is not None and then != now:
                warnings.warn(
                    f"the policy was fitted to {then} draws of view {name!r} and gets {now}; weights and uncertainty "
                    f"hold for the former: collect with draws={then}",
                    stacklevel=4,
                )
                return

    def _people(self, labels: LabelSets) -> Array:
        """Every label's annotator by its place in the fit; -1 for strangers."""
        if labels.annotator is None:
            place = -1 if self.annotator_names else 0
            return np.full(len(labels), place, dtype=np.intp)
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
        spread = normal_quantile**2 * np.einsum("mk,mn,nk->k", by_member, self.covariance, by_member)
        distance = np.einsum("m,mkl->kl", self.member_weights, limits - by_member[:, :, None])
        away = np.sqrt(distance**2 + spread[:, None])
        return np.asarray(np.clip(self.weights[:, None] + away * [-1.0, 1.0], 0, 1))

    def predict(self, predictions: ViewPredictions) -> Prediction:
        """The average of the members' predictive distributions."""
        parts = [member.posterior.predict(predictions.select(member.used_names)) for member in self.members]
        return self._pool(parts, np.tile(self.member_weights, (len(predictions), 1)))

    def consensus(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Prediction:
        """The average of the members' consensus, those that predicted the labels better weighing more."""
        parts = [
            member.posterior.consensus(predictions.select(member.used_names), labels, annotator)
            for member in self.members
        ]
        shares = np.tile(self.member_weights, (len(predictions), 1))
        shares[labels.labelled] = special.softmax(self._log_joint(predictions, labels, annotator)[0], axis=1)
        return self._pool(parts, shares)

    def score(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> Array:
        """Log score of every labelled input's label set: (N+,)."""
        joint, importance = self._log_joint(predictions, labels, annotator)
        return np.asarray(importance * special.logsumexp(joint, axis=1))

    def _log_joint(self, predictions: ViewPredictions, labels: LabelSets, annotator: Array) -> tuple[Array, Array]:
        """Log of weight times probability of the labels (N+, M), and the weights of the instances (N+,)."""
        rows = labels.labelled
        importance = np.ones(len(rows)) if labels.instance_weights is None else labels.instance_weights[rows]
        scores = [
            member.posterior.score(predictions.select(member.used_names), labels, annotator) for member in self.members
        ]
        return np.stack(scores, axis=1) / importance[:, None] + np.log(self.member_weights), importance

    def _pool(self, parts: list[Any], shares: Array) -> Prediction:
        return type(parts[0]).pool(parts, shares)  # type: ignore[no-any-return]

    def keep(self, views: Array) -> Posterior:
        """The same with only some of the views; members that use none of them go."""
        names = tuple(self.members[0].names[k] for k in views)
        places = [place for place, member in enumerate(self.members) if set(member.used_names) & set(names)]
        members = (self.members[place] for place in places)
        kept = tuple(
            member.restrict([k for k, name in enumerate(member._fitted) if name in names]).among(names)
            for member in members
        )
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
    parts = tuple(replace(members[m], rows=Rows()) for m in kept)  # the stack has them
    posterior = StackedPosterior(parts, shares, covariance[np.ix_(kept, kept)])
    first = members[0]
    return replace(
        first,
        model=model,
        engine=engine,
        posterior=posterior,
        history=History(np.zeros(0), np.zeros((0, len(first.names)))),
        final_elbo=np.nan,
        elbo_terms={},
        converged=all(member.converged for member in posterior.members),
        fitted=(),
        guard=guard,
        fingerprints={name: text for member in members for name, text in member.fingerprints.items()},
        steps=(),
        rows=members[kept[0]].rows,
    )


def _read_classes(data: Any, n_outputs: int) -> Array | None:
    """The classes of a policy, as :class:`ViewPredictions` has them."""
    if data is None:
        return None
    classes = np.asarray(data)
    if not isinstance(data, list) or classes.shape != (n_outputs,) or classes.dtype.kind not in "iubfU":
        raise ValueError(f"its classes are not {n_outputs} integers or strings")
    return classes


def _read_posterior(model: Model, engine: Engine, data: dict[str, Any], sizes: dict[str, int]) -> Any:
    """What :meth:`Policy.save` made of a posterior."""
    if not model.as_stack():
        return from_plain(posterior_type(model, engine), data, sizes)
    members = tuple(Policy.from_dict(member) for member in data["members"])
    sizes = {**sizes, "M": len(members)}
    weights = from_plain(Annotated[Array, "M"], data["member_weights"], sizes)
    covariance = from_plain(Annotated[Array, "M M"], data["covariance"], sizes)
    if len({(member.n_outputs, member.multilabel) for member in members}) != 1:
        raise ValueError("its members have other outputs")
    if (weights <= 0).any() or abs(weights.sum() - 1) > 1e-6 or len({member.names for member in members}) > 1:
        raise ValueError("its members' weights are not positive shares, or their views differ")
    return StackedPosterior(members, weights, covariance)


def _only_of_members(name: str, members: tuple[Policy, ...]) -> ValueError:
    kinds = ", ".join(type(member.model).__name__ for member in members)
    return ValueError(f"a stack has no {name} of its own; ask policy.members: {kinds}")
