"""Checks of single arguments and of optional packages, whose tensors become arrays: errors name value and remedy."""

import inspect
import math
import sys
from collections.abc import Callable
from importlib import import_module
from numbers import Real
from types import ModuleType
from typing import Any, SupportsFloat, cast

import numpy as np
from numpy.typing import NDArray

_LONGEST = 200  # characters of a value in a message


def between(name: str, value: object, low: float, high: float) -> None:
    """The value is a number between two others, both included."""
    if not low <= _real(value) <= high:
        raise ValueError(f"{name} must be a number between {low:g} and {high:g}; got {shown(value)}")


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """The value is one of a few."""
    if not isinstance(value, str | int | np.generic | None) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(option) for option in allowed)}; got {shown(value)}")


def positive(**values: object) -> None:
    """Every value is a positive number whose powers a float can hold, or None."""
    for name, value in values.items():
        if value is not None and not 1e-300 <= _real(value) <= 1e300:
            raise ValueError(f"{name} must be a positive number, 1e-300 to 1e300; got {shown(value)}")


def takes(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """The function can be called with so many arguments, as far as Python can see."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{name} must take ({', '.join(arguments)}): {error}; got {function!r}") from None
    except ValueError:  # a built-in whose signature cannot be seen
        return


def whole_number(name: str, value: object, least: int) -> int:
    """The value as an int; 3.0 is one, 2.5 and True are not."""
    number = _real(value)
    if not number.is_integer() or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {shown(value)}")
    return int(number)


def _real(value: object) -> float:
    """The value as a float; NaN where it is no number (True is none), or too large for one."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        return float(cast(SupportsFloat, value)) if number else math.nan
    except (OverflowError, TypeError):  # of a duration, which NumPy counts among the integers
        return math.nan


def row_numbers(rows: Any, size: int) -> Any:
    """Positions among so many rows, counted from 0, of a slice, a mask or positions."""
    try:
        return np.arange(size)[rows].reshape(-1)
    except (IndexError, TypeError, ValueError):
        raise ValueError(f"rows must be a slice, a mask or positions among {size}; got {shown(rows)}") from None


def real_array(name: str, values: Any) -> Any:
    """The values as an array of floats."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "cmMV":
            raise TypeError
        return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be numbers of a size that a float can hold; got {shown(values)}") from None


def printable(text: object, kept: str = "") -> str:
    """Text with control characters escaped, but for those `kept`: a terminal would execute those in files."""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)
    )


def shown(value: Any) -> str:
    """The representation of a value in one line, shortened, with NumPy scalars as plain numbers and strings."""
    text = " ".join(repr(_plain(value)).split("\n"))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import an optional module, or fail with the command that installs it, by the extra of vbtta that brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # a package that is installed but lacks a dependency is broken, not missing
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str | None) -> ImportError:
    """Make the error for an optional module that is not installed."""
    package = module.split(".")[0]
    command = f'pip install "vbtta[{extra}]"' if extra else f"pip install {package}"
    return ImportError(f"{package} is needed for this and is not installed: {command}", name=package)


def is_instance(value: object, module: str, name: str) -> bool:
    """Whether a value is an instance of a class of a package that may not be installed."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor."""
    return is_instance(value, "torch", "Tensor")


def to_array(values: Any) -> NDArray[Any]:
    """A tensor or anything array-like as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    if not is_tensor(values):
        return np.asarray(values)
    values = values.detach().cpu()
    return np.asarray((values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy())
