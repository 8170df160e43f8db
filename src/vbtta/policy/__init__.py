"""A policy: which views count how much, how they are calibrated, how good the annotators are."""

__all__ = ["KEPT", "ConvergenceWarning", "Guard", "GuardWarning", "History", "Policy", "Selection", "SelectionPoint"]

from vbtta.policy.policy import KEPT, Policy
from vbtta.policy.records import ConvergenceWarning, Guard, GuardWarning, History, Selection, SelectionPoint
