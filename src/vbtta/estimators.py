"""VBTTAClassifier and VBTTARegressor: a model, its views and a policy behind scikit-learn's methods."""

__all__ = ["VBTTAClassifier", "VBTTARegressor"]

import warnings
from dataclasses import replace
from typing import Any, Self

import numpy as np

from vbtta._support.extras import missing_extra
from vbtta.collect import collect_views
from vbtta.fit import fit_policy
from vbtta.labels import Array, LabelSets
from vbtta.predictions import CategoricalPrediction, ContinuousPrediction, ViewPredictions

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, RegressorMixin, clone
    from sklearn.exceptions import NotFittedError
    from sklearn.model_selection import check_cv
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, has_fit_parameter, validate_data
except ModuleNotFoundError as error:
    raise missing_extra("sklearn", "cli") from error

_LOWEST = float(np.log(1e-7))  # of a class that a fold's model never saw


class _Weighted(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    _task = ""

    def __init__(
        self,
        model: Any,
        views: Any,
        *,
        cv: Any = "frozen",
        draws: int = 1,
        policy_model: Any = "auto",
        engine: Any = "auto",
        guard: bool = True,
        batch_size: int = 256,
        random_state: Any = 0,
    ) -> None:
        self.model = model
        self.views = views
        self.cv = cv
        self.draws = draws
        self.policy_model = policy_model
        self.engine = engine
        self.guard = guard
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Infer the weights of the views from labelled inputs.

        Parameters
        ----------
        X : (N, ...) array or table
            Inputs the model was not trained on, if it is frozen.
        y : (N,) array, (N, M) array with gaps, or LabelSets
            One label or more for every input; NaN and None mean "no label". Several outputs go in as (N, M, C).
        sample_weight : (N,) array, optional
            How often the labels of an input count.
        groups : (N,) array, optional
            Passed to the splitter `cv`.
        """
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None")
        inputs = self._inputs(X, reset=True)
        labels = self._labels(y, len(inputs))
        weight = np.ones(len(inputs))
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, np.empty((len(inputs), 1)), ensure_non_negative=True)
            labels = _of_positive_weight(labels, weight)
        if not len(labels):
            raise ValueError("y has no labels of positive weight; at least one input needs a label")
        state = check_random_state(self.random_state)
        fixed = isinstance(self.random_state, int | np.integer)
        self.seed_ = int(self.random_state) if fixed else int(state.randint(2**31 - 1))
        if self._is_frozen():
            self._check_fitted_model()
            self.model_ = self.model
            predictions = self._collect(self.model_, inputs)
        else:
            predictions, labels, weight = self._out_of_fold(inputs, labels, groups, weight)
        predictions = self._named(predictions, labels)
        self._note(predictions, labels)
        options = {"task": self._task, "engine": self.engine, "seed": self.seed_}
        model = self.policy_model
        weighted = replace(labels, count=labels.count * weight[labels.instance])
        noise_is_open = self._task == "classification" or len(labels.annotator_names) > 1
        if noise_is_open and weighted.overlap != labels.overlap:
            # an input that counts twice is not one with two labels: weights must not decide how noisy labels are
            model = fit_policy(predictions, labels, model=model, guard=False, **options).model
        self.policy_ = fit_policy(predictions, weighted, model=model, guard=self.guard, **options)
        return self

    def __sklearn_clone__(self) -> Self:
        """A new estimator with the same parameters; a frozen model and the views are shared, not refitted or copied."""
        kept = {"views", "model"} if self._is_frozen() else {"views"}
        parameters = {
            name: value if name in kept else clone(value, safe=False)
            for name, value in self.get_params(deep=False).items()
        }
        new = type(self)(**parameters)
        for name in ("_metadata_request", "_sklearn_output_config"):
            if name in self.__dict__:
                setattr(new, name, self.__dict__[name])
        return new

    def __sklearn_tags__(self) -> Any:
        """Gaps in X are allowed where the model allows them."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._allows_gaps()
        return tags

    # -- steps of fit and predict -------------------------------------------------------------

    def _is_frozen(self) -> bool:
        return isinstance(self.cv, str) and self.cv == "frozen"

    def _allows_gaps(self) -> bool:
        if not hasattr(self.model, "__sklearn_tags__"):
            return False
        return bool(get_tags(self.model).input_tags.allow_nan)

    def _inputs(self, X: Any, *, reset: bool) -> Any:
        """Checked inputs: arrays of any dimension; tables stay tables, for their names and other types than numbers."""
        finite = "allow-nan" if self._allows_gaps() else True
        if hasattr(X, "iloc"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise ValueError(f"Found array with 0 sample(s) (shape={X.shape}) while a minimum of 1 is required.")
            return X
        return validate_data(self, X, reset=reset, allow_nd=True, dtype="numeric", ensure_all_finite=finite)

    def _labels(self, y: Any, n_inputs: int) -> LabelSets:
        if not isinstance(y, LabelSets):
            values = np.asarray(y)
            if values.dtype.kind == "f" and np.isinf(values).any():
                raise ValueError("Input y contains infinity or a value too large for dtype('float64').")
            if values.ndim and len(values) != n_inputs:
                raise ValueError(f"X has {n_inputs} rows and y {len(values)}: inconsistent numbers of samples")
            y = LabelSets.from_array(values)
        labels: LabelSets = y
        if self._task == "classification" and not labels.by_position and labels.value.ndim == 1:
            check_classification_targets(labels.value)
        return labels.align(n_inputs)

    def _check_fitted_model(self) -> None:
        """An estimator that was never fitted cannot be frozen."""
        if hasattr(self.model, "get_params"):
            try:
                check_is_fitted(self.model)
            except NotFittedError:
                raise NotFittedError(
                    f"model {type(self.model).__name__} is not fitted: fit it first on other data, or use cv=5 to have "
                    f"it fitted and its views collected out of fold"
                ) from None

    def _collect(self, model: Any, inputs: Any) -> ViewPredictions:
        return collect_views(model, inputs, self.views, draws=self.draws, batch_size=self.batch_size, seed=self.seed_)

    def _out_of_fold(
        self, inputs: Any, labels: LabelSets, groups: Any, weight: Array
    ) -> tuple[ViewPredictions, LabelSets, Array]:
        """Views of every labelled input from a model that was fitted without it; the model kept is fitted to all."""
        if not hasattr(self.model, "fit"):
            raise ValueError(
                f"cv={self.cv!r} fits copies of the model, and a {type(self.model).__name__} has no fit method; use "
                f"cv='frozen'"
            )
        labelled = np.bincount(labels.instance, minlength=len(inputs)) > 0
        first = np.searchsorted(labels.instance, np.arange(len(inputs)))
        target = labels.value[np.where(labelled, first, 0)]  # one label an input, any where there is none
        splitter = check_cv(self.cv, target, classifier=self._task == "classification")
        classes = np.unique(labels.value) if self._task == "classification" else None
        parts, places = [], []
        for train, held in splitter.split(inputs, target, groups):
            train, held = np.arange(len(inputs))[train], np.arange(len(inputs))[held]  # masks become row numbers
            model = self._fit_copy(inputs, labels, train[labelled[train]], weight)
            if labelled[held].any():
                places.append(held[labelled[held]])
                parts.append(_with_classes(self._collect(model, _take(inputs, places[-1])), classes))
        place = np.concatenate(places)
        if len(place) != labelled.sum() or len(np.unique(place)) != len(place):
            raise ValueError("cv must hold every labelled input out exactly once, as KFold does")
        self.model_ = self._fit_copy(inputs, labels, np.flatnonzero(labelled), weight)
        rows = np.sort(place)
        return parts[0].concat(parts[1:]).take(np.argsort(place)), labels.take(rows), weight[rows]

    def _fit_copy(self, inputs: Any, labels: LabelSets, rows: Array, weight: Array) -> Any:
        """A copy of the model fitted to some rows; an input with several labels is repeated."""
        some = labels.take(rows)
        options = {}
        count = some.count * weight[rows[some.instance]]
        if (count != 1).any():
            if has_fit_parameter(self.model, "sample_weight"):
                options["sample_weight"] = count
            else:
                warnings.warn(
                    f"{type(self.model).__name__} takes no sample_weight: the weights count for the policy only",
                    stacklevel=4,
                )
        target = some.value[:, 0] if some.value.ndim == 2 and some.value.shape[1] == 1 else some.value
        return clone(self.model).fit(_take(inputs, rows[some.instance]), target, **options)

    def _named(self, predictions: ViewPredictions, labels: LabelSets) -> ViewPredictions:
        """The predictions with the names of their outputs, where the labels tell them."""
        return predictions

    def _note(self, predictions: ViewPredictions, labels: LabelSets) -> None:
        """Set fitted attributes that depend on the task."""

    def _views_of(self, X: Any) -> ViewPredictions:
        check_is_fitted(self, "policy_")
        return self._collect(self.model_, self._inputs(X, reset=False))


class VBTTAClassifier(ClassifierMixin, _Weighted):  # type: ignore[misc]
    """A classifier that looks at its inputs through several views and weighs them by variational Bayes.

    Parameters
    ----------
    model : object
        A trained model (see :func:`vbtta.models.as_model`), or with another `cv` than "frozen" an estimator to fit.
    views : list of views
        What :func:`vbtta.augment.as_views` takes.
    cv : "frozen", int or splitter
        "frozen" uses the model as it is; then `fit` should get data that the model was not trained on. Otherwise copies
        of the model are fitted, views are collected out of fold, and the model is fitted to all data at the end.
    draws : int
        Draws of every stochastic view.
    policy_model, engine, guard
        As `model`, `engine` and `guard` of :func:`vbtta.fit_policy`.
    batch_size : int
        Inputs worked on at once.
    random_state : int, RandomState or None
        Decides draws and folds of the policy's own cross-validation.

    Attributes
    ----------
    policy_ : Policy
        Weights, calibration, annotators.
    model_ : object
        The model that `predict` uses.
    classes_ : (C,) array
        What the outputs stand for: as the model says, or 0..C-1; the sorted labels where they are words and the model
        (a torch module) names none.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression(max_iter=1000)
    >>> wise = VBTTAClassifier(model, [Identity(), GaussianNoise(0.1)], cv=3, policy_model="mixture", guard=False)
    >>> wise.fit(X, y).predict_proba(X[:2]).shape
    (2, 3)
    """

    _task = "classification"

    def _named(self, predictions: ViewPredictions, labels: LabelSets) -> ViewPredictions:
        """Words as labels of a model that knows no names: the sorted words are its outputs, as in scikit-learn."""
        words = not labels.by_position and labels.value.dtype.kind in "UO"
        if predictions.classes is not None or not words:
            return predictions
        found, n_outputs = np.unique(labels.value.astype(str)), predictions.mean.shape[2]
        if len(found) != n_outputs:
            raise ValueError(
                f"y has {len(found)} different words, and the model {n_outputs} outputs without names: use whole "
                f"numbers 0..{n_outputs - 1} as labels, the places of the outputs"
            )
        return ViewPredictions(
            predictions.mean,
            predictions.variance,
            names=predictions.names,
            classes=found,
            fingerprints=predictions.fingerprints,
        )

    def _note(self, predictions: ViewPredictions, labels: LabelSets) -> None:
        classes = getattr(self.model_, "classes_", predictions.classes)
        self.classes_ = np.arange(predictions.mean.shape[2]) if classes is None else np.asarray(classes)

    def predict(self, X: Any) -> Array:
        """The most probable class of every input: (N,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities: (N, C)."""
        return self.predict_distribution(X).proba

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithm of the class probabilities: (N, C)."""
        return np.asarray(np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny)))

    def predict_distribution(self, X: Any) -> CategoricalPrediction:
        """Class probabilities with entropy and disagreement of the views."""
        predictions = self._views_of(X)
        found = self.policy_.predict(predictions)
        assert isinstance(found, CategoricalPrediction)
        return found


class VBTTARegressor(RegressorMixin, _Weighted):  # type: ignore[misc]
    """A regressor that looks at its inputs through several views and weighs them by variational Bayes.

    Parameters
    ----------
    model : object
        A trained model (see :func:`vbtta.models.as_model`), or with another `cv` than "frozen" an estimator to fit.
    views, cv, draws, policy_model, engine, guard, batch_size, random_state
        As in :class:`VBTTAClassifier`.

    Attributes
    ----------
    policy_ : Policy
        Weights, calibration, annotators.
    model_ : object
        The model that `predict` uses.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import Ridge
    >>> from vbtta.augment import GaussianNoise, Identity
    >>> X, y = load_diabetes(return_X_y=True)
    >>> wise = VBTTARegressor(Ridge(), [Identity(), GaussianNoise(0.01)], cv=3).fit(X, y)
    >>> mean, std = wise.predict(X[:5], return_std=True)
    >>> mean.shape, std.shape
    ((5,), (5,))
    """

    _task = "regression"

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of every input, (N,) or (N, C), and with `return_std` the standard deviation as well."""
        found = self.predict_distribution(X)
        single = found.location.shape[2] == 1
        mean = found.mean[:, 0] if single else found.mean
        if not return_std:
            return mean
        std = np.sqrt(found.variance)
        return mean, std[:, 0] if single else std

    def predict_distribution(self, X: Any) -> ContinuousPrediction:
        """The predictive distribution: quantiles, intervals, log density, CRPS."""
        predictions = self._views_of(X)
        found = self.policy_.predict(predictions)
        assert isinstance(found, ContinuousPrediction)
        return found


def _of_positive_weight(labels: LabelSets, weight: Array) -> LabelSets:
    """The labels without those of inputs of weight zero."""
    keep = weight[labels.instance] > 0
    return replace(
        labels,
        instance=labels.instance[keep],
        value=labels.value[keep],
        count=labels.count[keep],
        annotator=None if labels.annotator is None else labels.annotator[keep],
    )


def _take(inputs: Any, rows: Array) -> Any:
    return inputs.iloc[rows] if hasattr(inputs, "iloc") else inputs[rows]


def _with_classes(predictions: ViewPredictions, classes: Array | None) -> ViewPredictions:
    """Predictions with a column for every class, also for those that a fold's model never saw."""
    if classes is None or predictions.classes is None or len(predictions.classes) == len(classes):
        return predictions
    shape = (*predictions.mean.shape[:2], len(classes))
    mean = np.full(shape, min(_LOWEST, float(predictions.mean.min())))
    column = np.searchsorted(
        classes.astype(str), predictions.classes.astype(str), sorter=np.argsort(classes.astype(str))
    )
    place = np.argsort(classes.astype(str))[column]
    mean[:, :, place] = predictions.mean
    variance = None
    if predictions.variance is not None:
        variance = np.zeros(shape)
        variance[:, :, place] = predictions.variance
    return ViewPredictions(
        mean, variance, names=predictions.names, classes=classes, fingerprints=predictions.fingerprints
    )
