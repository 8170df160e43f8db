"""A fitted estimator with scikit-learn's methods as a predictor."""

__all__ = ["EstimatorPredictor"]

import sys
from typing import Any

import numpy as np

from vbtta._support.tensors import Batch, RowList, is_tensor, to_array
from vbtta.adapters.base import Adapter, Output, log_probability, to_outputs
from vbtta.data.labels import Array

_KINDS = {"predict_proba": "log_probability", "decision_function": "decision", "predict": "raw"}  # by method


class EstimatorPredictor(Adapter):
    """A fitted classifier or regressor: scikit-learn's, or another library's with the same methods.

    Numeric tables (DataFrames) are given to views as arrays and to the estimator as tables again. `output` is a method
    ("predict_proba", "decision_function", "predict"; by default the first that a classifier has, and `predict` of a
    regressor), or a function of the result of `predict`.
    """

    def __init__(self, estimator: Any, output: Output = None) -> None:
        super().__init__(output)
        self.estimator = estimator
        self.method = _method(estimator, output)
        self.output_kind = _KINDS[self.method]
        if self.method != "predict":
            classes = getattr(estimator, "classes_", None)
            if classes is None:
                raise ValueError(f"the estimator {type(estimator).__name__} is not fitted: call its fit first")
            _check_single(classes)
            self.classes = np.asarray(classes)
        names = getattr(estimator, "feature_names_in_", None)
        self.features: list[Any] | None = None if names is None else list(names)

    def prepare(self, batch: Batch) -> Batch:
        """The features without labels; a table of numbers as an array, so that views can work on it."""
        if isinstance(batch, tuple | list) and not isinstance(batch, RowList) and batch:
            batch = batch[0] if hasattr(batch[0], "shape") or isinstance(batch[0], RowList) else batch
        if hasattr(batch, "to_pandas"):  # polars, Arrow
            batch = batch.to_pandas()
        if hasattr(batch, "columns"):
            columns = list(batch.columns)
            if self.features is not None and columns != self.features:
                raise ValueError(f"inputs have the columns {columns}; the estimator was fitted to {self.features}")
            kinds = {getattr(kind, "kind", "O") for kind in batch.dtypes}
            return batch.to_numpy(dtype=float if len(kinds) > 1 else None) if kinds <= set("fiub") else batch
        return to_array(batch) if is_tensor(batch) else batch

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C): log probabilities, decision values or predictions."""
        values = getattr(self.estimator, self.method)(self._with_names(to_array(batch) if is_tensor(batch) else batch))
        _check_single(values)
        if self.method == "predict_proba":
            values = log_probability(values)
        elif self.method == "decision_function" and np.ndim(values) == 1:
            values = np.stack([-values, values], axis=1) / 2  # two logits whose difference is the decision value
        elif callable(self.output):
            values = self.output(values)
        outputs = to_outputs(values, batch)
        if self.classes is not None and outputs.shape[1] != len(self.classes):
            raise ValueError(
                f"{self.method} of {type(self.estimator).__name__} has {outputs.shape[1]} columns for "
                f"{len(self.classes)} classes; one a class is needed (decision_function_shape='ovr' of a "
                f"support vector machine)"
            )
        return outputs

    def _with_names(self, batch: Batch) -> Batch:
        """Restore the column names, which an estimator fitted to a table asks for."""
        pandas = sys.modules.get("pandas")
        if self.features is None or pandas is None or not isinstance(batch, np.ndarray):
            return batch
        fits = batch.ndim == 2 and batch.shape[1] == len(self.features)
        return pandas.DataFrame(batch, columns=self.features) if fits else batch


def _method(estimator: Any, output: Output) -> str:
    """The method that gives the outputs."""
    available = [method for method in _KINDS if hasattr(estimator, method)]
    if isinstance(output, str):
        if output not in available:
            raise ValueError(f"output must be one of the estimator's methods {available}; got {output!r}")
        return output
    if isinstance(output, int):
        raise ValueError(f"output must be the name of a method or a function for an estimator; got {output}")
    if callable(output) or not _is_classifier(estimator):
        return "predict"
    if available[0] == "predict":
        raise ValueError(
            f"the classifier {type(estimator).__name__} has neither predict_proba nor decision_function; wrap it in "
            f"sklearn.calibration.CalibratedClassifierCV"
        )
    return available[0]


def _check_single(values: Any) -> None:
    """Refuse lists, which estimators with several targets return."""
    if isinstance(values, list):
        raise ValueError("the estimator predicts several classifications at once; wrap one of them")


def _is_classifier(estimator: Any) -> bool:
    """Whether labels are classes; hasattr(predict_proba) alone would include outlier detectors."""
    try:
        from sklearn.base import is_classifier

        return bool(is_classifier(estimator))
    except (ImportError, AttributeError, TypeError):  # other libraries may lack scikit-learn's tags
        return hasattr(estimator, "predict_proba") or getattr(estimator, "_estimator_type", None) == "classifier"
