"""What tells functions apart in this process and the next: their names, their code, and the values they hold."""

__all__ = ["identity"]

import hashlib
import re
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np


def identity(value: Any) -> str:
    """A function, or a value that one holds, in words.

    They change with the code, nested functions and constants included, with defaults and with what closures hold; not
    with line numbers, addresses, or the order of sets. Globals and the numbers inside a model are not looked at.

    Examples
    --------
    >>> identity(lambda x: x + 1) == identity(lambda x: x + 1)
    True
    >>> identity(lambda x: x + 1) == identity(lambda x: x + 2)
    False
    """
    return _words(value, ())


def _words(value: Any, outer: tuple[int, ...]) -> str:
    """`outer` are what this value is held by: who holds itself is not followed."""
    if id(value) in outer:
        return "itself"
    inside = (*outer, id(value))

    def several(*values: Any) -> str:
        return f"({', '.join(_words(one, inside) for one in values)})"

    def unordered(values: Iterable[Any]) -> str:
        return f"{{{', '.join(sorted(_words(one, inside) for one in values))}}}"

    if isinstance(value, CodeType):
        return several(value.co_code, value.co_consts, value.co_names, value.co_argcount, value.co_kwonlyargcount)
    if isinstance(value, FunctionType):
        held = [_content(cell) for cell in value.__closure__ or ()]
        return f"{_name(value)}{several(value.__code__, held, value.__defaults__, value.__kwdefaults__)}"
    if isinstance(value, MethodType):
        return several(value.__func__, value.__self__)
    if isinstance(value, partial):
        return f"partial{several(value.func, value.args, value.keywords)}"
    if isinstance(value, type):
        own = {name: part for name, part in vars(value).items() if isinstance(part, FunctionType)}
        return f"{_name(value)}{several(own)}"
    if isinstance(value, BuiltinFunctionType | ModuleType):
        return _name(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{several(*value)}"
    if isinstance(value, set | frozenset):
        return unordered(value)
    if isinstance(value, dict):
        return unordered(value.items())
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.dtype}{value.shape}{digest}"
    if hasattr(value, "__wrapped__"):
        return several(value.__wrapped__)
    kind = _words(type(value), inside) if callable(value) else _name(type(value))
    return f"{kind} {re.sub(r'0x[0-9a-fA-F]+', '', repr(value))}"  # where it lies is no part of what it is


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _content(cell: Any) -> Any:
    """What a closure's cell holds; one that is not filled yet holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
