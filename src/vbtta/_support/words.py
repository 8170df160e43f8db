"""Values in messages."""

__all__ = ["shown"]

from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """How Python writes a value, NumPy's scalars as the plain numbers and strings they stand for.

    Examples
    --------
    >>> shown([np.str_("cow"), np.float64(0.5), 2])
    "['cow', 0.5, 2]"
    """
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
