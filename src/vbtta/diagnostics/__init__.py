"""Whether the assumptions are met, which views matter, and whether incoming views still look the same."""

__all__ = ["Diagnosis", "diagnose", "effective_views", "henze_zirkler", "normality_of"]

from vbtta.diagnostics.checks import effective_views
from vbtta.diagnostics.diagnosis import Diagnosis, diagnose
from vbtta.diagnostics.normality import henze_zirkler, normality_of
