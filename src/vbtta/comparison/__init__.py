"""Does it help? Methods x metrics on a test set, with paired bootstrap intervals."""

__all__ = ["Comparison", "Difference", "compare"]

from vbtta.comparison.running import compare
from vbtta.comparison.table import Comparison, Difference
