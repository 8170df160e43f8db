"""Comparisons, diagnoses and their circumstances as plain data, for JSON files and for the page."""

__all__ = ["comparison_document", "diagnosis_document", "policy_document", "provenance"]

import math
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from vbtta._version import __version__
from vbtta.comparison import Comparison
from vbtta.diagnostics import Diagnosis
from vbtta.policy import Policy
from vbtta.specs import spec_to_dict

_UNKNOWN = {"options": "not recorded", "seed": "not recorded"}


def comparison_document(outcome: Comparison) -> dict[str, Any]:
    """A comparison without the fitted methods."""
    references = {"original": outcome.against_original, "best": outcome.against_best}
    return {
        "task": outcome.task,
        "metrics": list(outcome.metrics),
        "level": outcome.level,
        "n_instances": outcome.n_instances,
        "n_labels": outcome.n_labels,
        "references": {name: one.reference for name, one in references.items() if one is not None},
        "notes": list(outcome.notes),
        "methods": [_finite(record) for record in outcome.to_records()],
    }


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis in words and in numbers."""
    return {"summary": found.summary().splitlines(), "findings": found.to_dict()}


def policy_document(policy: Policy) -> dict[str, Any]:
    """What a fit found, in short."""
    interval = policy.weight_interval(0.9)
    return {
        "task": policy.task,
        "model": type(policy.model).__name__,
        "engine": type(policy.engine).__name__,
        "converged": policy.converged,
        "n_steps": policy.n_steps,
        "elbo": policy.elbo,
        "guard": policy.guard.reason,
        "views": [
            {"name": name, "weight": float(weight), "low": float(low), "high": float(high)}
            for name, weight, (low, high) in zip(policy.names, policy.weights, interval, strict=True)
        ],
        "annotators": _people(policy.annotators),
    }


def _people(known: Any) -> dict[str, Any] | None:
    """What is known of the annotators, field by field, as plain data."""
    if known is None:
        return None
    return {field: np.asarray(value).tolist() for field, value in known._asdict().items() if value is not None}


def provenance(policy: Policy, files: Mapping[str, str], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What it takes to get the same result again: versions, options, hashes of the data, and when it was done.

    Without options the seed and the rest are not recorded, and that is said.
    """
    versions = {"vbtta": __version__, "python": platform.python_version()}
    for name in ("numpy", "scipy", "torch", "matplotlib"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "model": _short(spec_to_dict(policy.model)),
        "engine": _short(spec_to_dict(policy.engine)),
        "options": {key: str(value) for key, value in (options or _UNKNOWN).items()},
        "files": dict(files),
    }


def _short(spec: Any) -> str:
    if not isinstance(spec, Mapping):
        return str(spec)
    return ", ".join(f"{key}={value}" for key, value in spec.items() if value is not None)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: an undefined number is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
