"""The other aggregators of views, each as its authors define it, behind one contract."""

__all__ = ["BASELINES", "Baseline", "fit_baseline"]

from vbtta.baselines.contract import Baseline
from vbtta.baselines.fitting import BASELINES, fit_baseline
