"""What comes with a policy: its history, the guard's verdict, the choice of views; and what a fit warns of."""

__all__ = ["ConvergenceWarning", "Guard", "GuardWarning", "History", "Selection", "SelectionPoint"]

from typing import NamedTuple

from vbtta.labels import Array


class ConvergenceWarning(UserWarning):
    """A fit stopped before its bound stood still.

    Examples
    --------
    >>> import warnings
    >>> import numpy as np
    >>> from vbtta import EM, ConvergenceWarning, ViewPredictions, fit_policy
    >>> views = np.random.default_rng(0).normal(size=(200, 3, 1))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", ConvergenceWarning)
    ...     policy = fit_policy(
    ...         ViewPredictions(views), views[:, 0, 0], task="regression", model="mixture", engine=EM(max_steps=2)
    ...     )
    >>> print(caught[0].message)
    GaussianMixture did not converge in 2 steps; raise EM(max_steps=...) or tol
    >>> policy.converged
    False
    """


class GuardWarning(UserWarning):
    """The views were worse than no augmentation, and the fit fell back to the identity view.

    Examples
    --------
    Eight views of noise, and too few labels to see that they are:

    >>> import warnings
    >>> import numpy as np
    >>> from vbtta import GuardWarning, ViewPredictions, fit_policy
    >>> rng = np.random.default_rng(3)
    >>> truth = rng.normal(size=15)
    >>> views = np.hstack([truth[:, None] + 0.1 * rng.normal(size=(15, 1)), rng.normal(size=(15, 8))])
    >>> predictions = ViewPredictions(views[:, :, None], names=["identity", *"abcdefgh"])
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", GuardWarning)
    ...     policy = fit_policy(predictions, truth, task="regression", model="mixture")
    >>> [warning.category.__name__ for warning in caught], policy.guard.fell_back
    (['GuardWarning'], True)
    """


class History(NamedTuple):
    """How a fit went, one entry an accepted update."""

    elbo: Array  # (T,)
    weights: Array  # (T, K)


class Guard(NamedTuple):
    """Whether the views were checked against the identity view alone, and what came of it."""

    checked: bool
    fell_back: bool
    difference: float  # cross-validated log score of the views minus the identity's, summed over instances
    standard_error: float
    reason: str


class SelectionPoint(NamedTuple):
    """One set of views and what it is worth."""

    views: tuple[str, ...]
    cost: float
    score: float  # cross-validated log score, mean over labelled instances
    difference: float  # from the score of all views, with its standard error
    standard_error: float


class Selection(NamedTuple):
    """The choice of views under a budget: cost and quality of the best sets found, cheapest first."""

    budget: float
    cost: dict[str, float]  # of every view
    chosen: SelectionPoint
    curve: tuple[SelectionPoint, ...]
