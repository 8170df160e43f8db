"""VBTTAClassifier and VBTTARegressor: an estimator, its views and a policy with scikit-learn's methods."""

__all__ = ["VBTTAClassifier", "VBTTARegressor"]

import warnings
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from vbtta._support.checks import missing_extra
from vbtta._support.tensors import RowList, as_batch, rows_of
from vbtta.collect import collect_views
from vbtta.data import labels as tables
from vbtta.data.labels import ID_COLUMNS, Array, LabelSets, id_column, id_like, index_of, people_of, rows_of_table
from vbtta.data.predictions import ViewPredictions
from vbtta.fit import fit_policy

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, RegressorMixin, clone
    from sklearn.exceptions import NotFittedError
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import check_cv
    from sklearn.utils import check_random_state, get_tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, has_fit_parameter, validate_data
except ModuleNotFoundError as error:
    raise missing_extra("sklearn", "cli") from error

_UNSEEN_CLASS_LOGIT = float(np.log(1e-7))  # of a class that is not in a fold's training data


class _WeightedViews(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Base of classifier and regressor."""

    _task = ""

    def __init__(
        self, estimator: Any, views: Any, *, cv: Any = "frozen", draws: int = 1, model: Any = "auto",
        engine: Any = "auto", guard: bool | Literal["hard"] = True, batch_size: int = 256, random_state: Any = 0,
    ) -> None:  # fmt: skip
        self.estimator = estimator
        self.views = views
        self.cv = cv
        self.draws = draws
        self.model = model
        self.engine = engine
        self.guard = guard
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Infer the weights of the views from labelled inputs.

        Parameters
        ----------
        X : (N, ...) array, table or list of texts
            Inputs that a frozen estimator was not trained on. Ids of a table are its index; a column of them is refused
            unless a frozen estimator was trained on it.
        y : (N,) array, (N, M) array with gaps, or LabelSets
            One label or more for every input; NaN and None mean "no label". Names of a table's columns are annotators.
            Several outputs go in as (N, M, C). As in scikit-learn rows are paired by position; pandas objects with
            another index than X are refused. LabelSets with ids are paired with the index of X.
        sample_weight : (N,) array, optional
            How often the labels of an input count.
        groups : (N,) array, optional
            Passed to the splitter `cv`.
        """
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None")
        for name, values in {"y": y, "sample_weight": sample_weight, "groups": groups}.items():
            _check_order(X, values, name)
        self._check_features(X)
        inputs = self._inputs(X, reset=True)
        labels = self._labels(y, X, len(inputs))
        weight = np.ones(len(inputs))
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, np.empty((len(inputs), 1)), ensure_non_negative=True)
            kept = np.flatnonzero(weight[labels.instance] > 0)
            labels = labels.place(labels.instance, len(inputs), labels.ids, kept)
        if not len(labels):
            raise ValueError("y has no labels of positive weight; at least one input needs a label")
        state = check_random_state(self.random_state)
        fixed = isinstance(self.random_state, int | np.integer)
        self.seed_ = int(self.random_state if fixed else state.randint(2**31 - 1))
        if self._is_frozen():
            self.estimator_ = self.estimator
            try:
                if hasattr(self.estimator, "get_params"):
                    check_is_fitted(self.estimator)
            except NotFittedError:
                kind = type(self.estimator).__name__
                raise NotFittedError(f"{kind} is not fitted: fit it first on other data, or use cv=5") from None
            predictions = self._collect(self.estimator_, inputs)
            rows = np.arange(len(predictions))
        else:
            predictions, labels, weight, rows = self._out_of_fold(inputs, labels, groups, weight)
        if groups is not None:
            predictions = predictions.with_groups(np.asarray(groups)[rows])
        if self._task == "classification":
            predictions = self._set_classes(predictions, labels)
        labels = labels.with_weights(np.where(weight > 0, weight, 1))
        options = {"model": self.model, "engine": self.engine, "guard": self.guard, "seed": self.seed_}
        self.policy_ = fit_policy(predictions, labels, task=self._task, **options)
        return self

    def predict_distribution(self, X: Any) -> Any:
        """The predictive distribution of :mod:`vbtta.distributions`, as :meth:`Policy.predict` returns it."""
        check_is_fitted(self, "policy_")
        return self.policy_.predict(self._collect(self.estimator_, self._inputs(X, reset=False)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, or R^2 of a regression, over all labels, one or more an input as in `fit`; GridSearchCV uses it."""
        _check_order(X, y, "y")
        _check_order(X, sample_weight, "sample_weight")
        predicted = self.predict(X)
        labels = self._labels(y, X, len(predicted))
        value = self.classes_[labels.value] if labels.by_position else labels.value
        weight = labels.count if sample_weight is None else labels.count * np.asarray(sample_weight)[labels.instance]
        metric = accuracy_score if self._task == "classification" else r2_score
        return float(metric(value, predicted[labels.instance], sample_weight=weight))

    def __sklearn_clone__(self) -> Self:
        """A new estimator with the same parameters; a frozen estimator and the views are shared, not copied."""
        shared = {"views", "estimator"} if self._is_frozen() else {"views"}
        parameters = self.get_params(deep=False).items()
        new = type(self)(**{name: value if name in shared else clone(value, safe=False) for name, value in parameters})
        for name in ("_metadata_request", "_sklearn_output_config"):
            if name in self.__dict__:
                setattr(new, name, self.__dict__[name])
        return new

    def __sklearn_tags__(self) -> Any:
        """NaN in X is allowed if the estimator allows it."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._allows_gaps()
        return tags

    def _is_frozen(self) -> bool:
        return isinstance(self.cv, str) and self.cv == "frozen"

    def _allows_gaps(self) -> bool:
        return hasattr(self.estimator, "__sklearn_tags__") and bool(get_tags(self.estimator).input_tags.allow_nan)

    def _inputs(self, X: Any, *, reset: bool) -> Any:
        """Checked inputs: arrays of any dimension; tables stay tables, for their names and types."""
        finite = "allow-nan" if self._allows_gaps() else True
        series = hasattr(X, "to_numpy") and getattr(X, "ndim", 0) == 1
        if isinstance(texts := as_batch(list(X) if series else X), RowList) and isinstance(texts[0], str):
            return texts
        if hasattr(X, "iloc"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise ValueError(f"Found array with 0 sample(s) (shape={X.shape}) while a minimum of 1 is required.")
            return X
        return validate_data(self, X, reset=reset, allow_nd=True, dtype="numeric", ensure_all_finite=finite)

    def _check_features(self, X: Any) -> None:
        """Refuse a column of ids, a different one in every row, as a feature."""
        known = getattr(self.estimator, "feature_names_in_", ()) if self._is_frozen() else ()
        columns = [name for name in getattr(X, "columns", ()) if isinstance(name, str) and name not in known]
        for name in (name for name in columns if name.lower() in ID_COLUMNS or id_like([name])):
            values = np.asarray(X[name])
            if values.dtype.kind != "f" and len(np.unique(values.astype(str))) == len(values) > 1:
                remedy = f"make it the index, as X.set_index({name!r}), leave it out, or rename it if it is a feature"
                raise ValueError(f"X has a column {name!r}, which looks like ids: {remedy}")

    def _labels(self, y: Any, X: Any, n_inputs: int) -> LabelSets:
        if not isinstance(y, LabelSets):
            table = rows_of_table(y, "y")
            if table.ids is not None and not hasattr(y, "iloc"):  # pandas: the index, whose order is checked
                raise ValueError("y has a column of ids; give LabelSets.from_table(y), or leave it out")
            values = table.values
            if values.dtype.kind == "f" and np.isinf(values).any():
                raise ValueError("Input y contains infinity or a value too large for dtype('float64').")
            if values.ndim and len(values) != n_inputs:
                remedy = "; of a long table give LabelSets.from_table(y)" if "label" in (table.names or []) else ""
                raise ValueError(f"X has {n_inputs} rows and y {len(values)}: inconsistent numbers of samples{remedy}")
            y = LabelSets.from_array(values, annotators=people_of(table.names or []))
        labels: LabelSets = y
        if self._task == "classification" and not labels.by_position and labels.value.ndim == 1:
            fractions = labels.value.dtype.kind == "f" and (labels.value != np.rint(labels.value)).any()
            if fractions and labels.columns not in (None, 1):
                remedy = "for probabilities use LabelSets.from_probabilities(y)"
                raise ValueError(f"y has columns of fractions, no classes; {remedy}")
            check_classification_targets(labels.value)
        return replace(labels.align(n_inputs, index_of(X, "X")), ids=None)

    def _collect(self, estimator: Any, inputs: Any) -> ViewPredictions:
        options: Any = {"draws": self.draws, "batch_size": self.batch_size, "seed": self.seed_}
        return collect_views(estimator, inputs, self.views, **options)

    def _out_of_fold(
        self, inputs: Any, labels: LabelSets, groups: Any, weight: Array
    ) -> tuple[ViewPredictions, LabelSets, Array, Array]:
        """Views of every labelled input from an estimator fitted without it; `estimator_` is fitted to all."""
        if not hasattr(self.estimator, "fit"):
            raise ValueError(f"cv={self.cv!r} fits copies, and the estimator has no fit method; use cv='frozen'")
        labelled = np.bincount(labels.instance, minlength=len(inputs)) > 0
        first = np.searchsorted(labels.instance, np.arange(len(inputs)))
        target = labels.value[np.where(labelled, first, 0)]  # one label per input, arbitrary without labels
        splitter = check_cv(self.cv, target, classifier=self._task == "classification")
        classes = np.unique(labels.value) if self._task == "classification" else None
        parts, held_out = [], []
        for train, test in splitter.split(inputs, target, groups):
            train, test = np.arange(len(inputs))[train], np.arange(len(inputs))[test]  # masks become row numbers
            fold_estimator = self._fit_copy(inputs, labels, train[labelled[train]], weight)
            if labelled[test].any():
                held_out.append(test[labelled[test]])
                parts.append(_with_classes(self._collect(fold_estimator, rows_of(inputs, held_out[-1])), classes))
        rows = np.concatenate(held_out)
        if len(rows) != labelled.sum() or len(np.unique(rows)) != len(rows):
            raise ValueError("cv must hold every labelled input out exactly once, as KFold does")
        self.estimator_ = self._fit_copy(inputs, labels, np.flatnonzero(labelled), weight)
        order = np.argsort(rows)
        rows = rows[order]
        return parts[0].concat(parts[1:]).take(order), labels.take(rows), weight[rows], rows

    def _fit_copy(self, inputs: Any, labels: LabelSets, rows: Array, weight: Array) -> Any:
        """A copy of the estimator fitted to some rows; an input with several labels is repeated."""
        subset = labels.take(rows)
        options = {}
        count = subset.count * weight[rows[subset.instance]]
        if (count != 1).any():
            if has_fit_parameter(self.estimator, "sample_weight"):
                options["sample_weight"] = count
            else:
                name = type(self.estimator).__name__
                warnings.warn(f"{name} takes no sample_weight: the weights count for the policy only", stacklevel=4)
        target = subset.value[:, 0] if subset.value.ndim == 2 and subset.value.shape[1] == 1 else subset.value
        return clone(self.estimator).fit(rows_of(inputs, rows[subset.instance]), target, **options)

    def _set_classes(self, predictions: ViewPredictions, labels: LabelSets) -> ViewPredictions:
        """Set `classes_`; if labels are words and the outputs have no names, these are the sorted words."""
        n_outputs = predictions.outputs.shape[2]
        if predictions.classes is None and not labels.by_position and labels.value.dtype.kind in "UO":
            words = np.unique(labels.value.astype(str))
            if len(words) != n_outputs:
                outputs = f"{n_outputs} outputs without names: use whole numbers 0..{n_outputs - 1} as labels"
                raise ValueError(f"y has {len(words)} different words, and the estimator {outputs}")
            predictions = predictions.like(predictions.outputs, predictions.variance, None, None, classes=words)
        classes = getattr(self.estimator_, "classes_", predictions.classes)
        self.classes_ = np.arange(n_outputs) if classes is None else np.asarray(classes)
        return predictions


class VBTTAClassifier(ClassifierMixin, _WeightedViews):  # type: ignore[misc]
    """A classifier that predicts under several views and weights them by variational Bayes.

    Parameters
    ----------
    estimator : object
        A trained predictor (see :func:`vbtta.adapters.as_predictor`), or unless `cv` is "frozen" an estimator to fit.
    views, draws, batch_size; model, engine, guard
        As in :func:`vbtta.collect_views`, and as in :func:`vbtta.fit_policy`.
    cv : "frozen", int or splitter
        "frozen" uses the estimator as it is; `fit` should then get data that it was not trained on. Otherwise copies
        are fitted, views are collected out of fold, and at the end a copy is fitted to all data.
    random_state : int, RandomState or None
        Determines draws and folds of the policy's own cross-validation.

    Attributes
    ----------
    policy_, estimator_
        Weights, calibration, annotators; the estimator that `predict` uses.
    classes_ : (C,) array
        Classes of the outputs: those of the estimator, or 0..C-1; the sorted labels if they are words and the
        estimator (a torch module) has no names.
    """

    _task = "classification"
    score = _WeightedViews.score  # not the mixin's, which takes one label an input

    def predict(self, X: Any) -> Array:
        """The most probable class of every input: (N,)."""
        best = self.predict_proba(X).argmax(axis=1)  # first: its error says that the estimator is not fitted
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities: (N, C)."""
        return np.asarray(self.predict_distribution(X).proba)

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithm of the class probabilities: (N, C)."""
        return np.asarray(np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny)))


class VBTTARegressor(RegressorMixin, _WeightedViews):  # type: ignore[misc]
    """A regressor that predicts under several views and weights them by variational Bayes.

    Parameters and attributes are those of :class:`VBTTAClassifier`.
    """

    _task = "regression"
    score = _WeightedViews.score

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of every input, (N,) or (N, C), and with `return_std` the standard deviation as well."""
        prediction = self.predict_distribution(X)
        mean = _columns(prediction.mean)
        return (mean, np.sqrt(_columns(prediction.variance))) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper limit of the predictive interval of every input, (N,) or (N, C) each."""
        low, high = self.predict_distribution(X).interval(level)
        return _columns(low), _columns(high)


def _columns(values: Array) -> Array:
    """Values (N, C), or (N,) of a single output."""
    return values[:, 0] if values.shape[1] == 1 else values


def _check_order(X: Any, values: Any, name: str) -> None:
    """Refuse pandas objects of other rows than X, or of the same in another order, and tables with a column of ids."""
    if hasattr(values, "iloc") and hasattr(values, "columns") and (key := id_column(values.columns, name)) is not None:
        way = "; of a long table give LabelSets.from_table(y), with the ids as the index of X" if name == "y" else ""
        raise ValueError(f"{name} has a column {key!r}: make it the index, in the order of X, or leave it out{way}")
    both = hasattr(X, "iloc") and hasattr(values, "iloc") and len(X) == len(values)
    if not both or X.index.equals(values.index):
        return
    if set(X.index) == set(values.index):
        raise ValueError(f"X and {name} have the same pandas index in another order: use {name}.loc[X.index]")
    if index_of(X, "X") is not None or index_of(values, name) is not None:
        raise ValueError(f"X and {name} have different pandas indices; pair them by row with {name}.to_numpy()")


def _with_classes(predictions: ViewPredictions, classes: Array | None) -> ViewPredictions:
    """Predictions with a column for every class, also for those that are not in a fold's training data."""
    if classes is None or predictions.classes is None or len(predictions.classes) == len(classes):
        return predictions
    columns, shape = tables.look_up(predictions.classes, classes)[0], (*predictions.outputs.shape[:2], len(classes))
    mean = np.full(shape, min(_UNSEEN_CLASS_LOGIT, float(predictions.outputs.min())))
    mean[:, :, columns] = predictions.outputs
    variance = None if predictions.variance is None else np.zeros(shape)
    if variance is not None:
        variance[:, :, columns] = predictions.variance
    return predictions.like(mean, variance, None, None, classes=classes)
