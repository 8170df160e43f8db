"""Optional packages: load one, or say which pip command installs it."""

__all__ = ["missing_extra", "require"]

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or fail with the command that installs the extra of vbtta that brings it.

    Examples
    --------
    >>> require("no_such_package", "torch")
    Traceback (most recent call last):
        ...
    ImportError: no_such_package is needed for this and is not installed: pip install "vbtta[torch]"
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A package that is installed but lacks a dependency is broken, not missing.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> ImportError:
    """Make the error for an optional module that is not installed."""
    package = module.split(".")[0]
    return ImportError(f'{package} is needed for this and is not installed: pip install "vbtta[{extra}]"', name=package)
