"""A diagnosis in words."""

__all__ = ["summary_of"]

from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from vbtta.policy import KEPT

if TYPE_CHECKING:
    from vbtta.diagnostics.diagnosis import Diagnosis

_SMALL = 0.01  # p-values below that are worth a remark, given that several are looked at
_RARE = 0.001  # chance of so many rejections among Gaussian draws
_MOVED = 0.2  # total variation of weights that hang on a prior
_ALIKE = 0.9  # overlap of views that do the same


def summary_of(found: "Diagnosis") -> str:
    """One line a finding; an exclamation mark where something asks for attention."""
    lines = [
        *_views(found),
        *_noise(found),
        *_overlap(found),
        *_influence(found),
        *_predictive(found),
        *_sensitivity(found),
        *_normality(found),
        *_drift(found),
    ]
    return "\n".join(lines)


def _views(found: "Diagnosis") -> list[str]:
    kept = np.flatnonzero(found.weights >= KEPT)
    lines = [
        f"{len(kept)} of {len(found.names)} views have weight ({100 * KEPT:.0f} % or more); they count as "
        f"{found.effective_views:.1f} equal ones."
    ]
    for k in kept[np.argsort(-found.weights[kept], kind="stable")][:8]:
        low, high = found.weight_interval[k]
        lines.append(f"  {found.names[k]}: {found.weights[k]:.3f} (90 % interval {low:.3f} to {high:.3f})")
    if not found.converged:
        lines.append("! The fit did not converge: raise EM(max_steps=...).")
    mark = "! " if found.guard.fell_back else ""
    lines.append(f"{mark}Against the identity view alone: {found.guard.reason}.")
    return lines


def _noise(found: "Diagnosis") -> list[str]:
    people = found.annotators
    if people is None:
        return ["Label noise is not modelled."]
    if hasattr(people, "accuracy"):
        shown = [
            f"{name} {value:.2f} ({low:.2f} to {high:.2f})"
            for name, value, (low, high) in zip(people.names, people.accuracy, people.accuracy_interval, strict=True)
        ]
        return [f"Estimated accuracy of the labels: {_list(shown)}."]
    shown = [
        f"{name} {np.mean(noise):.3g} (bias {np.mean(bias):+.3g})"
        for name, noise, bias in zip(people.names, people.noise, people.bias, strict=True)
    ]
    return [f"Estimated standard deviation of the annotators: {_list(shown)}."]


def _overlap(found: "Diagnosis") -> list[str]:
    if found.overlap is None:
        return []
    names, matrix = found.overlap.names, found.overlap.matrix
    pairs = [(matrix[a, b], a, b) for a in range(len(names)) for b in range(a)]
    if not pairs:
        return []
    alike = sorted((pair for pair in pairs if pair[0] >= _ALIKE), reverse=True)
    if not alike:
        value, a, b = max(pairs)
        return [f"No two views explain the same labels; nearest are {names[b]} and {names[a]} (overlap {value:.2f})."]
    shown = [f"{names[b]} and {names[a]} ({value:.2f})" for value, a, b in alike]
    return [f"Views that explain the same labels (overlap): {_list(shown)}."]


def _influence(found: "Diagnosis") -> list[str]:
    part = found.influence
    if part is None:
        return []
    better = [k for k in np.flatnonzero(found.weights > 0) if part.score[k] > 2 * part.standard_error[k] > 0]
    lines = []
    order = np.argsort(part.score, kind="stable")
    missed = [k for k in order if part.score[k] < -2 * part.standard_error[k]]
    if missed:
        shown = [f"{part.names[k]} ({part.score[k]:+.4f} per input)" for k in missed]
        lines.append(f"Held-out scores fall beyond two standard errors without {_list(shown)}.")
    else:
        lines.append("No single view is missed: held-out scores do not fall beyond two standard errors without it.")
    if better:
        shown = [f"{part.names[k]} ({part.score[k]:+.4f} per input)" for k in better]
        lines.append(f"! Held-out scores rise without {_list(shown)}.")
    return lines


def _predictive(found: "Diagnosis") -> list[str]:
    if found.predictive is None:
        return []
    wrong = [check for check in found.predictive if check.p_value < _SMALL]
    if not wrong:
        return [f"Simulated label sets look like the observed ones in all {len(found.predictive)} respects."]
    return [
        f"! {check.statistic[0].upper()}{check.statistic[1:]}: observed {check.observed:.4g}, the model expects "
        f"{check.expected:.4g} ({check.low:.4g} to {check.high:.4g})."
        for check in wrong
    ]


def _sensitivity(found: "Diagnosis") -> list[str]:
    if not found.sensitivity:
        return []
    worst = max(found.sensitivity, key=lambda one: one.distance)
    moved = f"{100 * worst.distance:.0f} % of the weight moves at most, with {worst.prior} times {worst.factor:.2g}"
    mark = "! The weights hang on a prior" if worst.distance > _MOVED else "The weights do not hang on the priors"
    return [f"{mark}: {moved}."]


def _normality(found: "Diagnosis") -> list[str]:
    part = found.normality
    if part is None:
        return ["Normality of the draws was not tested: there are none (collect_views(keep_draws=...))."]
    lines = []
    for k in np.flatnonzero(part.tested):
        shares = (part.henze_zirkler[k], part.anderson_darling[k], part.shapiro_wilk[k])
        n = int(part.tested[k])
        names = ("Henze-Zirkler", "Anderson-Darling", "Shapiro-Wilk")
        done = {name: share for name, share in zip(names, shares, strict=True) if not np.isnan(share)}
        chance = min(
            float(special.bdtrc(round(share * n) - 1, n, part.level)) for share in done.values()
        )  # of so many or more
        mark = "! " if chance < _RARE else ""
        few = "" if len(done) == len(names) else "; too few draws for Henze-Zirkler, which needs two more than outputs"
        lines.append(
            f"{mark}{part.names[k]}: draws are not Gaussian for so many of {n} inputs: "
            f"{', '.join(f'{100 * share:.0f} % ({name})' for name, share in done.items())}; "
            f"{100 * part.level:.0f} % is what chance gives{few}."
        )
    return lines or ["Normality of the draws was not tested: no view's draws vary."]


def _drift(found: "Diagnosis") -> list[str]:
    part = found.drift
    if part is None:
        return []
    lines = ["! Incoming views differ from calibration time:" if part.drifted else "Incoming views look as before:"]
    shown = [
        f"  {check.signal}: {check.reference:.4g} then, {check.incoming:.4g} now ({check.shift:+.2f} standard "
        f"deviations, p = {check.p_value:.2g})"
        for check in part.checks
    ]
    return lines + shown


def _list(items: list[str], most: int = 6) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
