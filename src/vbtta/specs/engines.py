"""How a model is inferred."""

__all__ = ["ADVI", "EM", "EngineSpec"]

from dataclasses import dataclass
from typing import Literal

from vbtta._support.checks import between, one_of, positive, whole_number


@dataclass(frozen=True, kw_only=True)
class EM:
    """Variational EM: closed-form steps that never lower the bound (docs/method, eqs. 4 to 10 and 15 to 24).

    Parameters
    ----------
    max_steps : int
        Most accepted updates.
    tol : float
        Stop when the bound gains less than this per label; 0 runs `max_steps` without a warning.
    accelerate : bool
        Whether to extrapolate between steps.
    keep_states : bool
        Whether to keep every step's state for :meth:`Policy.at_step`.

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import EM, ViewPredictions, fit_policy
    >>> views = np.random.default_rng(0).normal(size=(200, 3, 1))  # (N, K, C)
    >>> engine = EM(keep_states=True)
    >>> policy = fit_policy(ViewPredictions(views), views[:, 0, 0], task="regression", model="mixture", engine=engine)
    >>> bool((np.diff(policy.history.elbo) >= 0).all())
    True
    >>> policy.at_step(1).weights.round(2), policy.weights.round(2)
    (array([0.33, 0.33, 0.33]), array([1., 0., 0.]))
    """

    max_steps: int = 1000
    tol: float = 1e-7
    accelerate: bool = True
    keep_states: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_steps", whole_number("max_steps", self.max_steps, least=1))
        between("tol", self.tol, 0, 1)


@dataclass(frozen=True, kw_only=True)
class ADVI:
    """Automatic differentiation variational inference on Pyro: a full-rank normal on the unconstrained parameters.

    Parameters
    ----------
    steps : int
        Gradient steps, all of which are taken; the step length falls along a cosine.
    bound : {"elbo", "renyi", "iwae"}
        What is maximised. All bound the log evidence from below; the importance-weighted one is the tightest for a
        number of particles, and its weights the noisiest.
    alpha : float, optional
        Order of the Renyi bound, between 0 (importance-weighted) and 1 (ELBO); 0.5 by default.
    particles : int
        Draws per step.
    batch_size : int, optional
        Labels (or instances, where their labels share a truth) per step; all of them by default. Bounds other
        than the ELBO are then no longer bounds on the way; at the end all data count.
    learning_rate : float
        Of Adam.
    keep_states : bool
        Whether to keep the state that every step started from for :meth:`Policy.at_step`.

    Notes
    -----
    Weights always have a Dirichlet prior here; its concentration is 1 where the model states none.

    Examples
    --------
    >>> import numpy as np
    >>> from vbtta import ADVI, ViewPredictions, fit_policy
    >>> ADVI(bound="renyi").order, ADVI(bound="iwae").order
    (0.5, 0.0)
    >>> rng = np.random.default_rng(0)
    >>> views = rng.normal(size=(400, 2, 1))  # (N, K, C)
    >>> labels = views[np.arange(400), rng.choice(2, size=400, p=[0.7, 0.3])] + 0.1 * rng.normal(size=(400, 1))
    >>> engine = ADVI(steps=300, particles=2, learning_rate=0.1)
    >>> policy = fit_policy(ViewPredictions(views), labels, task="regression", engine=engine)
    >>> policy.weights.round(1)
    array([0.7, 0.3])
    """

    steps: int = 3000
    bound: Literal["elbo", "renyi", "iwae"] = "elbo"
    alpha: float | None = None
    particles: int = 8
    batch_size: int | None = None
    learning_rate: float = 0.02
    keep_states: bool = False

    def __post_init__(self) -> None:
        one_of("bound", self.bound, ("elbo", "renyi", "iwae"))
        positive(learning_rate=self.learning_rate)
        for name in ("steps", "particles", "batch_size"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least=1))
        if self.alpha is not None and self.bound != "renyi":
            raise ValueError(f"alpha is the order of bound='renyi'; leave it out with bound={self.bound!r}")
        if self.alpha is not None:
            between("alpha", self.alpha, 0, 1)

    @property
    def order(self) -> float:
        """The order of the bound as a Renyi bound: 1 for the ELBO, 0 for the importance-weighted one."""
        if self.bound == "renyi":
            return 0.5 if self.alpha is None else self.alpha
        return 1.0 if self.bound == "elbo" else 0.0


EngineSpec = EM | ADVI
