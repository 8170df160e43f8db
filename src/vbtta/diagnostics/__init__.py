"""Whether the assumptions are met, which views matter, and whether incoming views still look the same."""

__all__ = [
    "Diagnosis", "copying_of", "diagnose", "drift_of", "effective_views", "henze_zirkler", "holm", "influence_of",
    "normality_of", "overlap_of", "predictive_checks", "prior_sensitivity",
]  # fmt: skip

from vbtta.diagnostics.checks import (
    copying_of,
    drift_of,
    effective_views,
    influence_of,
    overlap_of,
    predictive_checks,
    prior_sensitivity,
)
from vbtta.diagnostics.diagnosis import Diagnosis, diagnose
from vbtta.diagnostics.normality import henze_zirkler, holm, normality_of
