"""Fingerprints of predictions, "<digits of the view>/<kind of output>[/<draws>]", and whether two fit each other."""

__all__ = ["conflict", "draws_of"]

_UNKNOWN = ("", "-")


def conflict(known: str, found: str) -> str | None:
    """Say what differs between two fingerprints; None where they agree or one does not tell.

    Examples
    --------
    >>> conflict("3f2a/raw", "3f2a/raw"), conflict("-/raw", "3f2a/raw"), conflict("", "3f2a/raw")
    (None, None, None)
    >>> conflict("3f2a/raw", "77b1/raw")
    'has other parameters'
    >>> conflict("3f2a/raw", "3f2a/log_probability")
    "has 'log_probability' outputs instead of 'raw'"
    """
    known_view, known_output = (*known.split("/"), "")[:2]
    found_view, found_output = (*found.split("/"), "")[:2]
    if known_output and found_output and known_output != found_output:
        return f"has {found_output!r} outputs instead of {known_output!r}"
    if known_view in _UNKNOWN or found_view in _UNKNOWN or known_view == found_view:
        return None
    return "has other parameters"


def draws_of(text: str) -> int | None:
    """How many draws the predictions of a stochastic view are the mean of; None where that is not told.

    Examples
    --------
    >>> draws_of("3f2a/raw/16"), draws_of("3f2a/raw")
    (16, None)
    """
    parts = text.split("/")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else None
