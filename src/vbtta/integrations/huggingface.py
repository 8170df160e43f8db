"""Hugging Face: processors in front of a model, and policies in folders and repositories of the Hub."""

__all__ = ["ProcessedPredictor", "calibration", "from_hub", "hub_policy", "model_card"]

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vbtta import metrics, plotting
from vbtta._support.checks import require
from vbtta._support.tensors import Batch, RowList
from vbtta._version import __version__
from vbtta.adapters.base import Adapter, Output, as_predictor
from vbtta.data.labels import Array
from vbtta.data.predictions import ViewPredictions
from vbtta.diagnostics.checks import label_sets, two_class
from vbtta.policy import Policy

_FILE, _FIGURE = "policy.json", "calibration.svg"


class ProcessedPredictor(Adapter):
    """A model of transformers behind its processor: rows are PIL images, texts or signals, and views see those.

    The processor is an image processor, tokenizer or feature extractor, and `options` are its options, such as
    ``sampling_rate=16000``; tokenizers pad and truncate by default. `key` is the column of a data set that it takes, by
    default the only one that holds no numbers; `output` as in :func:`vbtta.adapters.as_predictor`.
    """

    def __init__(
        self, model: Any, processor: Any, key: str | None = None, output: Output = None, **options: Any
    ) -> None:
        super().__init__(output)
        self.predictor, self.processor, self.key = as_predictor(model, output), processor, key
        self.output_kind, self.classes = self.predictor.output_kind, self.predictor.classes
        defaults = {"padding": True, "truncation": True} if hasattr(processor, "pad_token") else {}
        self.options = {"return_tensors": "pt", **defaults, **options}

    def ready(self) -> AbstractContextManager[object]:
        """Evaluation mode and no gradients."""
        return self.predictor.ready()

    def prepare(self, batch: Batch) -> Batch:
        """The rows of a batch, without labels and other columns."""
        if not isinstance(batch, Mapping):
            return batch[0] if type(batch) in (list, tuple) else batch
        keys = [key for key, part in batch.items() if isinstance(part, RowList)] if self.key is None else [self.key]
        if len(keys) != 1 or keys[0] not in batch:
            raise ValueError(f"ProcessedPredictor(key={self.key!r}) must say which of the columns {list(batch)}")
        return batch[keys[0]]

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        return self.predictor(dict(self.processor(list(batch), **self.options)))


@cache
def hub_policy() -> Any:
    """The class of a policy by the Hub's convention (`save_pretrained`, `push_to_hub`, a card).

    It is made on use, since its base is in `huggingface_hub`. Instances hold a policy and held-out data, if any.
    """
    hub = require("huggingface_hub", "huggingface")

    class HubPolicy(hub.ModelHubMixin):  # type: ignore[misc, name-defined]
        def __init__(self, policy: Policy, predictions: Any = None, labels: Any = None) -> None:
            self._hub_mixin_config = None  # the policy's file says all
            if (predictions is None) != (labels is None):
                raise ValueError("give predictions and labels, both held out, or neither")
            self.policy, self.held_out = policy, None if predictions is None else (predictions, labels)

        def _save_pretrained(self, save_directory: Path) -> None:
            self.policy.save(save_directory / _FILE)
            if self.held_out is not None:
                plotting.save_svg(calibration(self.policy, *self.held_out)[0], save_directory / _FIGURE)

        def generate_model_card(self, *args: Any, **texts: str) -> Any:
            measured = None if self.held_out is None else calibration(self.policy, *self.held_out)[1]
            return hub.ModelCard(model_card(self.policy, measured, **texts))

    return HubPolicy


def from_hub(folder_or_repo: str, **options: Any) -> Policy:
    """The policy of a folder or a repository; options are those of `huggingface_hub.hf_hub_download`."""
    folder = Path(folder_or_repo)
    if folder.exists() or folder.is_absolute():
        return Policy.load(folder / _FILE)
    return Policy.load(require("huggingface_hub", "huggingface").hf_hub_download(folder_or_repo, _FILE, **options))


def model_card(policy: Policy, measured: str | None = None, *, data: str = "Not described.", limits: str = "") -> str:
    """The card of a policy: weights, calibration, and data and limits in the caller's words."""
    limited = zip(policy.names, policy.weights, policy.weight_interval(), strict=True)
    rows = [f"| {name} | {weight:.3f} | [{low:.3f}, {high:.3f}] |" for name, weight, (low, high) in limited]
    shown = f"On held-out labels: {measured}.\n\n![Calibration]({_FIGURE})" if measured else "Not measured."
    parts = {
        "# Weights of test-time augmentations": f"{policy!r}, made with vbtta {__version__}. Load it with "
        "`vbtta.Policy.from_pretrained(...)`, and give it the same views of the same network.",
        "## Weights": "\n".join(["| view | weight | 90 % interval |", "|---|---|---|", *rows]),
        "## Does it help?": f"Compared with one pass of the network: {policy.guard.reason}.",
        "## Calibration": shown,
        "## Data": data,
        "## Limits": "Weights and calibration hold for inputs and labels like those of the calibration sample, for "
        f"this network and these views; check others with `vbtta.diagnose`. {limits}",
    }
    header = f"---\nlibrary_name: vbtta\ntags: [vbtta, test-time-augmentation, {policy.task}]\n---"
    return "\n\n".join([header, *(f"{title}\n\n{text}" for title, text in parts.items())]) + "\n"


def calibration(policy: Policy, predictions: ViewPredictions, labels: Any) -> tuple[Any, str]:
    """A figure of calibration on held-out labels, and its numbers in words."""
    labels = label_sets(labels, policy)
    policy, predictions = two_class(policy, predictions)
    aligned = predictions.align(labels)
    predicted: Any = policy.predict(predictions).take(aligned.instance)
    if policy.task == "regression":
        levels, y = np.arange(0.1, 1.0, 0.1), aligned.continuous(predicted.mean.shape[1])
        limits = (predicted.interval(level) for level in levels)
        covered = np.array([metrics.interval_coverage(y, low, high, aligned.count) for low, high in limits])
        return plotting.coverage(levels, covered), f"90 % intervals cover {100 * covered[-1]:.1f} %"
    y = aligned.categorical(predicted.proba.shape[1], predicted.classes)
    hit, error = metrics.hits(y, predicted.proba), metrics.ece(y, predicted.proba, aligned.count)
    figure = plotting.reliability(predicted.proba.max(axis=1), hit, aligned.count)
    return figure, f"accuracy {np.average(hit, weights=aligned.count):.3f}, calibration error {error:.3f}"
