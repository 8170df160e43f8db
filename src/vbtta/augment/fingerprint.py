"""What a view does, in a few digits: equal for equal parameters, whatever process or machine."""

__all__ = ["view_fingerprint"]

import hashlib
import json
from dataclasses import fields
from typing import Any

import numpy as np

from vbtta.augment.base import Augmentation, BuiltIn
from vbtta.augment.mixing import Pool

UNKNOWN = "-"


def view_fingerprint(view: Augmentation) -> str:
    """Twelve hexadecimal digits that stand for a view's kind and parameters, its name left out.

    A pool counts by its rows. Another library's transform counts by its printed form where that tells its parameters;
    a function does not tell what it does and has the fingerprint "-", which fits any other.

    Examples
    --------
    >>> from vbtta.augment import GaussianNoise
    >>> view_fingerprint(GaussianNoise(0.1)) == view_fingerprint(GaussianNoise(0.1, name="n"))
    True
    >>> view_fingerprint(GaussianNoise(0.1)) == view_fingerprint(GaussianNoise(0.2))
    False
    """
    described = _describe(view)
    if described is None:
        return UNKNOWN
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def _describe(value: Any) -> Any:
    """Parameters as plain data; None where they cannot be told."""
    if isinstance(value, Pool):
        rows = np.ascontiguousarray(value.rows.detach().cpu().numpy() if hasattr(value.rows, "detach") else value.rows)
        return [list(rows.shape), str(rows.dtype), hashlib.sha256(rows.data).hexdigest()]
    if isinstance(value, BuiltIn):
        parts = {
            item.name: _describe(getattr(value, item.name))
            for item in fields(value)
            if item.name != "name" and getattr(value, item.name) is not None
        }
        return None if None in parts.values() else [type(value).__name__, parts]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return _describe(value.item())
    if isinstance(value, tuple):
        parts_of = [_describe(part) for part in value]
        return None if None in parts_of else parts_of
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # Rotate(10) and Rotate(10.0) are the same view
    if isinstance(value, str | bool):
        return value
    transform = getattr(value, "transform", None) or getattr(value, "function", None) or value
    text = repr(transform)
    return None if "0x" in text or "function" in text else text
