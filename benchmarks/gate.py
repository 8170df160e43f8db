"""Coverage of the intervals of a gate's coefficients, and what a gate costs where it is not needed.

``python -m benchmarks.gate`` prints a table; tests/test_gate.py has the same with fewer samples.
"""

import numpy as np

from tests.test_gate import RECORDS, TRUE, fit, gated_data, log_score
from vbtta import ViewPredictions

SAMPLES, COST_SAMPLES, HELD_OUT = 500, 40, 3000


def coverage(task: str, n_labels: int) -> float:
    """Share of 90 % intervals that hold the true coefficient."""
    hits = []
    for seed in range(SAMPLES):
        predictions, labels = gated_data(task, seed, n_labels)
        gate = fit(task, predictions, labels, features="none").gate
        assert gate is not None
        lower, upper = gate.interval(0.9).T
        hits.append((lower <= TRUE * gate.scale) & (TRUE * gate.scale <= upper))
    return float(np.mean(hits))


def cost(task: str, n_labels: int) -> float:
    """Held-out log score lost to constant weights, in nats an input, where the weights are constant."""
    losses = []
    for seed in range(COST_SAMPLES):
        predictions, labels = gated_data(task, seed, n_labels + HELD_OUT, slopes=np.zeros(2))
        views = ViewPredictions(predictions.outputs)
        fitted, held_out = views.take(slice(n_labels)), views.take(slice(n_labels, None))
        policies = [fit(task, fitted, labels[:n_labels], weights=weights) for weights in ("view", "input")]
        constant, gated = (log_score(policy, held_out, labels[n_labels:]) for policy in policies)
        losses.append(constant - gated)
    return float(np.mean(losses))


if __name__ == "__main__":
    for task in RECORDS:
        for n_labels in (20, 50, 300, 1000):
            print(f"{task} {n_labels:5d} labels: cost {cost(task, n_labels):+.4f} nats", flush=True)
        print(f"{task} coverage of 90 % intervals, 300 labels: {coverage(task, 300):.3f}", flush=True)
