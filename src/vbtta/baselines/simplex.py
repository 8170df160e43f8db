"""Maximum-likelihood weights on the simplex: a convex problem, solved to a certified gap."""

__all__ = ["mixture_weights"]

import warnings

import numpy as np
from scipy import optimize

from vbtta.labels import Array


def mixture_weights(log_likelihood: Array, count: Array, *, gap: float = 1e-9, max_steps: int = 200) -> Array:
    """Weights w that maximise sum_j n_j ln sum_k w_k exp(log_likelihood_jk): (K,).

    Sequential quadratic programming as in mixsqp (Kim, Carbonetto, Stephens, Anitescu, "A fast algorithm for maximum
    likelihood estimation of mixture proportions using sequential quadratic programming", 2020): the simplex is
    replaced by w >= 0 and a term sum_k w_k in the objective, every quadratic problem is solved exactly by
    non-negative least squares, and steps are halved until the objective falls. With the gradient of the mean
    log-likelihood d_k = (1/n) sum_j n_j L_jk / (L w)_j, no weights are better than w by more than max_k d_k - 1:
    the iteration ends when that is below `gap`.

    Parameters
    ----------
    log_likelihood : (J, K) array
    count : (J,) array
    """
    scaled = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True))  # a factor a row changes nothing
    share = count / count.sum()
    n_views = scaled.shape[1]
    weights = np.full(n_views, 1 / n_views)
    value = _objective(scaled, share, weights)
    for _ in range(max_steps):
        ratio = scaled / (scaled @ weights)[:, None]  # (J, K)
        slope = share @ ratio  # (K,)
        if slope.max() - 1 <= gap:
            break
        hessian = (ratio * share[:, None]).T @ ratio
        target = _nonnegative_quadratic(hessian, hessian @ weights - (1 - slope))
        step, tried = 1.0, value
        while step > 1e-10:
            trial = weights + step * (target - weights)
            tried = _objective(scaled, share, trial)
            if tried < value:
                break
            step *= 0.5
        if not tried < value:
            # Rounding stops the quadratic steps; one EM step never lowers the likelihood.
            trial = weights * slope
            tried = _objective(scaled, share, trial)
            if not tried < value:
                break
        weights = trial / trial.sum()  # the best of its multiples
        value = _objective(scaled, share, weights)
    else:
        warnings.warn(f"mixture weights did not converge in {max_steps} steps", RuntimeWarning, stacklevel=2)
    weights = np.where(weights > 1e-12, weights, 0.0)
    return np.asarray(weights / weights.sum())


def _objective(scaled: Array, share: Array, weights: Array) -> float:
    mixed = scaled @ weights
    if mixed.min() <= 0:
        return np.inf
    return float(weights.sum() - share @ np.log(mixed))


def _nonnegative_quadratic(hessian: Array, linear: Array) -> Array:
    """Minimise 1/2 x'Hx - linear'x over x >= 0, as least squares with H = R'R."""
    ridge = 1e-10 * np.trace(hessian) / len(hessian)
    lower = np.linalg.cholesky(hessian + ridge * np.eye(len(hessian)))
    solution, _ = optimize.nnls(lower.T, np.linalg.solve(lower, linear))
    return np.asarray(solution)
