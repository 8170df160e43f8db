"""Hugging Face: processors in front of a model, and policies in folders and repositories of the Hub.

Models of transformers, their outputs, dict batches and data sets need nothing of this: :func:`vbtta.collect_views` and
:class:`vbtta.TTAModule` take them as they are.
"""

__all__ = ["HubPolicy", "ProcessedPredictor"]

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from vbtta import metrics, plotting
from vbtta._support.checks import missing_extra
from vbtta._support.tensors import Batch, RowList
from vbtta._version import __version__
from vbtta.adapters.base import Adapter, Output, as_predictor
from vbtta.data.labels import Array
from vbtta.policy import Policy

try:
    from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
except ModuleNotFoundError as error:
    raise missing_extra("huggingface_hub", "huggingface") from error

_FILE, _FIGURE = "policy.json", "calibration.svg"


class ProcessedPredictor(Adapter):
    """A model of transformers behind its processor: rows are PIL images, texts or signals, and views see those.

    Parameters
    ----------
    model : transformers model
    processor : image processor, tokenizer or feature extractor
    key : str, optional
        The column of a data set that it takes; by default the only one that holds no numbers.
    output : optional
        As in :func:`vbtta.adapters.as_predictor`; by default the logits.
    options
        Of the processor, such as ``sampling_rate=16000``. Tokenizers pad and truncate by default.

    Examples
    --------
    >>> predictor = ProcessedPredictor(model, AutoImageProcessor.from_pretrained(name))  # doctest: +SKIP
    >>> collect_views(predictor, dataset, views)  # doctest: +SKIP
    """

    def __init__(
        self, model: Any, processor: Any, key: str | None = None, output: Output = None, **options: Any
    ) -> None:
        super().__init__(output)
        self.predictor, self.processor, self.key = as_predictor(model, output), processor, key
        self.output_kind = self.predictor.output_kind
        defaults = {"padding": True, "truncation": True} if hasattr(processor, "pad_token") else {}
        self.options = {"return_tensors": "pt", **defaults, **options}
        names = getattr(model.config, "id2label", None) or {}
        if names and not all(str(name).startswith("LABEL_") for name in names.values()):
            self.classes = np.array([names[place] for place in sorted(names)])

    def ready(self) -> AbstractContextManager[object]:
        """Evaluation mode and no gradients."""
        return self.predictor.ready()

    def prepare(self, batch: Batch) -> Batch:
        """The rows of a batch, without labels and other columns."""
        if not isinstance(batch, Mapping):
            return batch[0] if type(batch) in (list, tuple) else batch
        keys = [key for key, part in batch.items() if isinstance(part, RowList)] if self.key is None else [self.key]
        if len(keys) != 1 or keys[0] not in batch:
            raise ValueError(f"key={self.key!r} does not say which of the columns {list(batch)} the processor takes")
        return batch[keys[0]]

    def __call__(self, batch: Batch) -> Array:
        """Outputs (B, C)."""
        return self.predictor(dict(self.processor(list(batch), **self.options)))


class HubPolicy(ModelHubMixin):  # type: ignore[misc]
    """A policy by the convention of the Hub: `save_pretrained`, `push_to_hub`, `from_pretrained`; a model card.

    Parameters
    ----------
    policy : Policy
    predictions, labels : optional
        Held-out data; calibration is shown on them.

    Examples
    --------
    >>> from vbtta import ViewPredictions, fit_policy
    >>> x = np.random.default_rng(0).normal(size=(50, 1, 1))
    >>> policy = fit_policy(ViewPredictions(x), x[:, 0, 0] + 1, task="regression", guard=False)
    >>> HubPolicy(policy).generate_model_card(data="Fifty numbers.").text.splitlines()[0]
    '# Weights of test-time augmentations'
    """

    def __init__(self, policy: Policy, predictions: Any = None, labels: Any = None) -> None:
        self._hub_mixin_config = None  # the policy's file says all
        self.policy, self.held_out = policy, None if predictions is None else (predictions, labels)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.policy.save(save_directory / _FILE)
        if self.held_out is not None:
            plotting.save_svg(self._calibration()[0], save_directory / _FIGURE)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> "HubPolicy":
        known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        local = Path(model_id) / _FILE
        chosen = {name: options[name] for name in known if name in options}
        return cls(Policy.load(local if local.is_file() else hf_hub_download(model_id, _FILE, **chosen)))

    def generate_model_card(self, *args: Any, **texts: str) -> Any:
        """The card: weights, calibration, `data` and `limits` in the caller's words."""
        policy = self.policy
        limits = policy.weight_interval(0.9)
        rows = [f"| {name} | {weight:.3f} | [{low:.3f}, {high:.3f}] |"
                for name, weight, (low, high) in zip(policy.names, policy.weights, limits, strict=True)]  # fmt: skip
        calibration = "Not measured: no held-out data were given."
        if self.held_out is not None:
            calibration = f"On held-out labels: {self._calibration()[1]}.\n\n![Calibration]({_FIGURE})"
        header = f"---\nlibrary_name: vbtta\ntags: [vbtta, test-time-augmentation, {policy.task}]\n---"
        parts = {
            "# Weights of test-time augmentations": f"{policy!r}, made with vbtta {__version__}. Load it with "
            "`vbtta.Policy.from_pretrained(...)`, and give it the same views of the same network.",
            "## Weights": "\n".join(["| view | weight | 90 % interval |", "|---|---|---|", *rows]),
            "## Does it help?": f"Compared with one pass of the network: {policy.guard.reason}.",
            "## Calibration": calibration,
            "## Data": texts.get("data", "Not described."),
            "## Limits": "Weights and calibration hold for inputs and labels like those of the calibration sample, for "
            "this network and these views; check others with `vbtta.diagnose`. " + texts.get("limits", ""),
        }
        return ModelCard("\n\n".join([header, *(f"{title}\n\n{text}" for title, text in parts.items())]) + "\n")

    def _calibration(self) -> tuple[Any, str]:
        """A figure of calibration, and the numbers."""
        assert self.held_out is not None
        predictions, labels = self.held_out[0], self.held_out[0].align(self.held_out[1])
        found, times = self.policy.predict(predictions).take(labels.instance), labels.count
        if self.policy.task == "regression":
            levels, y = np.arange(0.1, 1.0, 0.1), labels.continuous(found.mean.shape[1])
            covered = np.array([metrics.interval_coverage(y, *found.interval(level), times) for level in levels])
            return plotting.coverage(levels, covered), f"90 % intervals cover {100 * covered[-1]:.1f} %"
        y = labels.categorical(found.proba.shape[1], found.classes)
        hit = found.proba.argmax(axis=1) == y
        right, error = np.average(hit, weights=times), metrics.ece(y, found.proba, times)
        figure = plotting.reliability(found.proba.max(axis=1), hit, times)
        return figure, f"accuracy {right:.3f}, calibration error {error:.3f}"
