"""Models of any framework behind one face: batches in, (B, C) outputs out."""

from vbtta.models.base import Model, as_model, log_probability

__all__ = ["Model", "as_model", "log_probability"]
