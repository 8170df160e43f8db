"""Does it help? Methods x metrics on a test set, with paired bootstrap intervals."""

__all__ = ["Comparison", "Difference", "compare"]

import sys
from types import ModuleType
from typing import Any

from vbtta.compare.running import compare
from vbtta.compare.table import Comparison, Difference


class _CallableModule(ModuleType):
    """`vbtta.compare` is the function until this module is imported, and then the module: let both be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Comparison:
        return compare(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
