"""nnU-Net v2: a predictor whose mirroring is a policy, and collecting from validation cases."""

__all__ = ["PolicyMirroring", "collect_cases", "policy_predictor"]

from collections.abc import Sequence
from typing import Any

import numpy as np

from vbtta._support.checks import require
from vbtta.augment.sets import volume_flips
from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.integrations import collect_items
from vbtta.policy import Policy


class PolicyMirroring:
    """Mixin of nnU-Net predictors: the mirroring step returns the log pooled probabilities of a policy.

    Windows, ensembles of folds, resampling and export stay as they are. `use_mirroring=False` turns the policy off. By
    default `views` are all mirror images, of which the policy takes its own.
    """

    network: Any
    label_manager: Any
    use_mirroring: bool

    def __init__(self, policy: Policy, views: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.policy, self.views = policy, views
        self._module: Any = None

    def _internal_maybe_mirror_and_predict(self, x: Any) -> Any:
        """Maps (B, C, ...) of windows (B, channels, ...): the step that nnU-Net calls."""
        from vbtta.module import TTAModule

        with require("torch", "torch").inference_mode():
            if not self.use_mirroring:
                return self.network(x)
            if self._module is None or self._module.network is not self.network:
                _check_labels(self.label_manager)
                views = volume_flips(range(x.ndim - 2)) if self.views is None else self.views
                self._module = TTAModule(self.network, views, self.policy, output="log_probability")
            return self._module(x)


def policy_predictor(policy: Policy, views: Any = None, **options: Any) -> Any:
    """Make an nnUNetPredictor with :class:`PolicyMirroring`; options are those of nnUNetPredictor."""
    base = require("nnunetv2.inference.predict_from_raw_data").nnUNetPredictor
    return type("PolicyPredictor", (PolicyMirroring, base), {})(policy, views, **options)


def collect_cases(
    predictor: Any, folder: str, cases: Sequence[str], views: Any = None, **options: Any
) -> tuple[ViewPredictions, LabelSets]:
    """Collect maps and masks of preprocessed cases: instances are voxels, groups are cases.

    `predictor` is the nnUNetPredictor of a fold, and `cases` are its validation cases,
    ``load_json("splits_final.json")[fold]["val"]``, in the folder of the preprocessed configuration, such as
    ``nnUNet_preprocessed/Dataset001/nnUNetPlans_3d_fullres``. Views are all mirror images by default, along axes that
    nnU-Net does not mirror, too. `options` are those of :func:`vbtta.collect_dense`; `positions` are drawn per case, or
    per slice for 2-D configurations.
    """
    _check_labels(predictor.label_manager)
    if predictor.configuration_manager.previous_stage_name is not None:
        raise ValueError("collect_cases takes single networks; the predictor's is the second stage of a cascade")
    reader = require("nnunetv2.training.dataloading.nnunet_dataset").infer_dataset_class
    data_set, torch = reader(folder)(folder, list(cases)), require("torch", "torch")
    sliced = len(predictor.configuration_manager.patch_size) == 2
    items = [(case, s) for case in cases for s in range(data_set.load_case(case)[1].shape[1] if sliced else 1)]

    def load(i: int) -> tuple[Any, Any]:
        where = (slice(None), items[i][1]) if sliced else slice(None)
        data, mask = (np.asarray(part[where]) for part in data_set.load_case(items[i][0])[:2])
        return torch.from_numpy(data.astype(np.float32)), np.maximum(mask[0], 0)  # -1 is background as well

    def predict(batch: Any) -> Any:
        logits = predictor.predict_logits_from_preprocessed_data(batch[0][:, None] if sliced else batch[0])
        return (logits[:, 0] if sliced else logits)[None].float()

    n_axes = 2 if sliced else 3
    views = volume_flips(range(n_axes)) if views is None else views
    options.setdefault("ignore", predictor.label_manager.ignore_label)
    ids = [f"{case}/{s}" if sliced else case for case, s in items]
    mirrored, predictor.use_mirroring = predictor.use_mirroring, False
    try:
        predictions, labels = collect_items(predict, len(items), load, views, ids=ids, **options)
    finally:
        predictor.use_mirroring = mirrored
    case_of = {name: case for name, (case, _) in zip(ids, items, strict=True)}
    return predictions.with_groups([case_of[name] for name in np.asarray(predictions.groups).tolist()]), labels


def _check_labels(label_manager: Any) -> None:
    """Refuse regions, whose probabilities do not add up to one."""
    if label_manager.has_regions:
        raise ValueError("the network was trained on regions (sigmoid outputs); train it on classes instead")
