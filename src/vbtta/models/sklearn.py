"""A fitted estimator with scikit-learn's methods as a model."""

__all__ = ["EstimatorModel"]

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from vbtta.labels import Array
from vbtta.models.base import Batch, Output, as_columns, log_probability, n_rows_of, to_numpy

_METHODS = ("predict_proba", "decision_function", "predict")
_KINDS = {"predict_proba": "log_probability", "decision_function": "decision", "predict": "raw"}


class EstimatorModel:
    """A fitted classifier or regressor: scikit-learn's, or another library's with the same methods.

    Parameters
    ----------
    estimator : object
        Fitted. Numeric tables (DataFrames) are handed to views as arrays and to the estimator as tables again.
    output : {"predict_proba", "decision_function", "predict"} or callable, optional
        Which method; by default the first of them that a classifier has, and `predict` of a regressor.
        A callable is applied to what `predict` returns.
    """

    def __init__(self, estimator: Any, output: Output = None) -> None:
        self.estimator = estimator
        self.method = _method(estimator, output)
        self.then = output if callable(output) else None
        self.output_kind = _KINDS[self.method]
        self.classes: Array | None = None
        if self.method != "predict":
            classes = getattr(estimator, "classes_", None)
            if classes is None:
                raise ValueError(f"the estimator {type(estimator).__name__} is not fitted: call its fit first")
            if isinstance(classes, list):
                raise ValueError("the estimator predicts several classifications at once; wrap one of them")
            self.classes = np.asarray(classes)
        names = getattr(estimator, "feature_names_in_", None)
        self.features: list[Any] | None = None if names is None else list(names)

    def ready(self) -> AbstractContextManager[object]:
        """Nothing to do."""
        return nullcontext()

    def prepare(self, batch: Batch) -> Batch:
        """A table of numbers as an array, so that views can work on it; the features only, without labels."""
        if isinstance(batch, tuple | list) and batch and hasattr(batch[0], "shape"):
            batch = batch[0]
        if hasattr(batch, "iloc"):
            found = list(batch.columns)
            if self.features is not None and found != self.features:
                raise ValueError(f"inputs have the columns {found}; the estimator was fitted to {self.features}")
            numeric = all(getattr(kind, "kind", "O") in "fiub" for kind in batch.dtypes)
            return batch.to_numpy() if numeric else batch
        if hasattr(batch, "detach"):
            return batch.detach().cpu().numpy()
        return batch

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C): log probabilities, decision values or predictions."""
        n_rows = n_rows_of(batch)
        if hasattr(batch, "detach"):
            batch = batch.detach().cpu().numpy()
        result = getattr(self.estimator, self.method)(self._named(batch))
        if isinstance(result, list):
            raise ValueError("the estimator predicts several classifications at once; wrap one of them")
        if self.then is not None:
            result = self.then(result)
        values = to_numpy(result)
        if self.method == "predict_proba":
            values = log_probability(values)
        if self.method == "decision_function" and values.ndim == 1:
            values = 0.5 * np.stack([-values, values], axis=1)  # two logits whose difference is the decision value
        outputs: Array = as_columns(values, n_rows)
        if self.classes is not None and outputs.shape[1] != len(self.classes):
            raise ValueError(
                f"{self.method} of {type(self.estimator).__name__} has {outputs.shape[1]} columns for "
                f"{len(self.classes)} classes; one a class is needed (decision_function_shape='ovr' of a "
                f"support vector machine)"
            )
        return outputs

    def _named(self, batch: Batch) -> Batch:
        """Put the column names back that an estimator fitted to a table asks for."""
        pandas = sys.modules.get("pandas")
        if self.features is None or pandas is None or not isinstance(batch, np.ndarray) or batch.ndim != 2:
            return batch
        return pandas.DataFrame(batch, columns=self.features) if batch.shape[1] == len(self.features) else batch


def _method(estimator: Any, output: Output) -> str:
    if isinstance(output, str):
        if output not in _METHODS or not hasattr(estimator, output):
            has = [method for method in _METHODS if hasattr(estimator, method)]
            raise ValueError(f"output must be one of the estimator's methods {has}; got {output!r}")
        return output
    if isinstance(output, int):
        raise ValueError(f"output must be the name of a method or a function for an estimator; got {output}")
    if callable(output):
        return "predict"
    if not _is_classifier(estimator):
        return "predict"
    found = next((method for method in _METHODS[:2] if hasattr(estimator, method)), None)
    if found is None:
        raise ValueError(
            f"the classifier {type(estimator).__name__} has neither predict_proba nor decision_function; wrap it in "
            f"sklearn.calibration.CalibratedClassifierCV"
        )
    return found


def _is_classifier(estimator: Any) -> bool:
    """Whether labels are classes; hasattr(predict_proba) alone would call outlier detectors classifiers."""
    try:
        from sklearn.base import is_classifier

        return bool(is_classifier(estimator))
    except (ImportError, AttributeError, TypeError):  # other libraries need not know scikit-learn's tags
        return hasattr(estimator, "predict_proba") or getattr(estimator, "_estimator_type", None) == "classifier"
