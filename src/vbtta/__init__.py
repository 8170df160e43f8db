"""Weighted test-time augmentation by variational Bayes.

Public names load on first use, so that importing the package needs NumPy and SciPy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vbtta._version import __version__

if TYPE_CHECKING:
    from vbtta.adapters import as_predictor
    from vbtta.baselines import fit_baseline
    from vbtta.collect import collect_views, measure_cost
    from vbtta.comparison import compare
    from vbtta.conformal import ConformalPolicy, conformalize
    from vbtta.data.labels import LabelSets
    from vbtta.data.predictions import ViewPredictions
    from vbtta.dense import collect_dense
    from vbtta.diagnostics import diagnose
    from vbtta.estimators import VBTTAClassifier, VBTTARegressor
    from vbtta.fit import fit_policy
    from vbtta.inference.advi import ADVI, DivergenceError
    from vbtta.inference.em import EM
    from vbtta.models.base import Stack
    from vbtta.models.categorical_latent.spec import CategoricalLatent
    from vbtta.models.categorical_mixture.spec import CategoricalMixture
    from vbtta.models.gaussian_latent.spec import GaussianLatent
    from vbtta.models.gaussian_mixture.spec import GaussianMixture
    from vbtta.models.ordinal.spec import OrdinalMixture
    from vbtta.models.pyro.spec import PyroModel
    from vbtta.models.ranking.spec import RankingMixture
    from vbtta.module import TTAModule
    from vbtta.policy import ConvergenceWarning, GuardWarning, Policy
    from vbtta.select import select_views
    from vbtta.sequential import SequentialPolicy, fit_sequential

__all__ = [
    "ADVI", "EM", "CategoricalLatent", "CategoricalMixture", "ConformalPolicy", "ConvergenceWarning",
    "DivergenceError", "GaussianLatent", "GaussianMixture", "GuardWarning", "LabelSets", "OrdinalMixture", "Policy",
    "PyroModel", "RankingMixture", "SequentialPolicy", "Stack", "TTAModule", "VBTTAClassifier", "VBTTARegressor",
    "ViewPredictions", "__version__", "as_predictor", "collect_dense", "collect_views", "compare", "conformalize",
    "diagnose", "fit_baseline", "fit_policy", "fit_sequential", "measure_cost", "select_views",
]  # fmt: skip

_NAMES = {
    "adapters": "as_predictor",
    "baselines": "fit_baseline",
    "collect": "collect_views measure_cost",
    "comparison": "compare",
    "conformal": "ConformalPolicy conformalize",
    "data.labels": "LabelSets",
    "data.predictions": "ViewPredictions",
    "dense": "collect_dense",
    "diagnostics": "diagnose",
    "estimators": "VBTTAClassifier VBTTARegressor",
    "fit": "fit_policy",
    "inference.advi": "ADVI DivergenceError",
    "inference.em": "EM",
    "models.categorical_latent.spec": "CategoricalLatent",
    "models.categorical_mixture.spec": "CategoricalMixture",
    "models.gaussian_latent.spec": "GaussianLatent",
    "models.gaussian_mixture.spec": "GaussianMixture",
    "models.ordinal.spec": "OrdinalMixture",
    "models.pyro.spec": "PyroModel",
    "models.ranking.spec": "RankingMixture",
    "models.base": "Stack",
    "module": "TTAModule",
    "policy": "ConvergenceWarning GuardWarning Policy",
    "select": "select_views",
    "sequential": "SequentialPolicy fit_sequential",
}
_MODULES = ("augment", "distributions", "metrics")  # public modules, loaded on first use


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"vbtta.{name}")
    module = next((module for module, names in _NAMES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module 'vbtta' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"vbtta.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
