"""Trained models of any framework behind one protocol: batches in, (B, C) outputs out."""

from vbtta.adapters.base import Predictor, as_predictor, log_probability

__all__ = ["Predictor", "as_predictor", "log_probability"]
