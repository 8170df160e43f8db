"""Weighted test-time augmentation by variational Bayes.

Views in, weights out: a model's predictions under K augmentations and the label sets of a
calibration sample go in; a policy comes out, which turns the same views of a new input into one
predictive distribution. Public names load on first use, so that importing the package needs NumPy
and SciPy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vbtta._version import __version__

if TYPE_CHECKING:
    from vbtta.baselines import fit_baseline
    from vbtta.collect import collect_views, measure_cost
    from vbtta.comparison import compare
    from vbtta.diagnostics import diagnose
    from vbtta.estimators import VBTTAClassifier, VBTTARegressor
    from vbtta.fit import fit_policy
    from vbtta.infer.advi.ascent import DivergenceError
    from vbtta.labels import LabelSets
    from vbtta.models import as_model
    from vbtta.module import TTAModule
    from vbtta.policy import ConvergenceWarning, GuardWarning, Policy
    from vbtta.predictions import ViewPredictions
    from vbtta.select import select_views
    from vbtta.specs import (
        ADVI,
        EM,
        CategoricalLatent,
        CategoricalMixture,
        GaussianLatent,
        GaussianMixture,
        OrdinalMixture,
        PyroModel,
        RankingMixture,
    )

__all__ = [
    "ADVI",
    "EM",
    "CategoricalLatent",
    "CategoricalMixture",
    "ConvergenceWarning",
    "DivergenceError",
    "GaussianLatent",
    "GaussianMixture",
    "GuardWarning",
    "LabelSets",
    "OrdinalMixture",
    "Policy",
    "PyroModel",
    "RankingMixture",
    "TTAModule",
    "VBTTAClassifier",
    "VBTTARegressor",
    "ViewPredictions",
    "__version__",
    "as_model",
    "collect_views",
    "compare",
    "diagnose",
    "fit_baseline",
    "fit_policy",
    "measure_cost",
    "select_views",
]

_HOME = {
    "ADVI": "specs",
    "EM": "specs",
    "CategoricalLatent": "specs",
    "CategoricalMixture": "specs",
    "ConvergenceWarning": "policy",
    "DivergenceError": "infer.advi.ascent",
    "GaussianLatent": "specs",
    "GaussianMixture": "specs",
    "GuardWarning": "policy",
    "LabelSets": "labels",
    "OrdinalMixture": "specs",
    "Policy": "policy",
    "PyroModel": "specs",
    "RankingMixture": "specs",
    "TTAModule": "module",
    "VBTTAClassifier": "estimators",
    "VBTTARegressor": "estimators",
    "ViewPredictions": "predictions",
    "as_model": "models",
    "collect_views": "collect",
    "compare": "comparison",
    "diagnose": "diagnostics",
    "fit_baseline": "baselines",
    "fit_policy": "fit",
    "measure_cost": "collect",
    "select_views": "select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vbtta' has no attribute {name!r}")
    value = getattr(import_module(f"vbtta.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
