"""MONAI: an inferer that applies a policy, and collecting from MONAI's data sets.

MONAI's invertible transforms are views by :func:`vbtta.augment.as_view`. A :class:`vbtta.TTAModule` is the `network` of
any inferer; :class:`PolicyInferer` makes it of the network that an evaluator or a bundle passes on.
"""

__all__ = ["PolicyInferer", "collect_dataset"]

from collections.abc import Callable
from typing import Any

from vbtta.data.labels import LabelSets
from vbtta.data.predictions import ViewPredictions
from vbtta.integrations import collect_items
from vbtta.policy import Policy


class PolicyInferer:
    """An inferer whose network is the given one with the views of a policy.

    The result is the logarithm of the pooled probabilities by default: a softmax or argmax after it stays as it is. Of
    an inferer such as ``SlidingWindowInferer(roi_size)`` every window is predicted under the views. `options` are those
    of :class:`vbtta.TTAModule`, such as ``output="probability"``.

    Examples
    --------
    >>> import torch
    >>> from vbtta import ViewPredictions, fit_policy
    >>> from vbtta.augment import HorizontalFlip, Identity
    >>> views = [Identity(), HorizontalFlip()]
    >>> x = torch.randn(60, 2, 2, generator=torch.Generator().manual_seed(0)).numpy()
    >>> predictions = ViewPredictions(x, names=["identity", "hflip"])
    >>> policy = fit_policy(predictions, x.mean(1).argmax(1), task="classification", guard=False)
    >>> inferer = PolicyInferer(lambda inputs, network: network(inputs), views, policy)  # as SimpleInferer()
    >>> inferer(torch.zeros(1, 2, 4, 4), torch.nn.Identity()).shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(self, inferer: Callable[..., Any], views: Any, policy: Policy, **options: Any) -> None:
        self.inferer, self.views, self.policy = inferer, views, policy
        default = {"output": "log_probability"} if policy.task == "classification" else {}
        self.options = default | options
        self._module: Any = None

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        """Maps of the inputs (B, channels, H, W) or (B, channels, D, H, W)."""
        from vbtta.module import TTAModule

        module = self._module  # another thread may pass another network
        if module is None or module.network is not network:
            module = self._module = TTAModule(network, self.views, self.policy, **self.options)
        return self.inferer(inputs, module, *args, **kwargs)


def collect_dataset(
    network: Any, dataset: Any, views: Any, *,
    image: str = "image", label: str = "label", inferer: Callable[..., Any] | None = None, **options: Any,
) -> tuple[ViewPredictions, LabelSets]:  # fmt: skip
    """Collect from a MONAI data set of dictionaries, one item in memory at a time.

    Items hold an image (channels, H, W) or (channels, D, H, W) and a label map (1, H, W) or (1, D, H, W), or one
    channel a rater, under the keys `image` and `label`; the transforms must not draw random numbers. The network is
    applied by `inferer`, or to whole inputs. `options` are those of :func:`vbtta.collect_dense`, such as `positions`.

    Examples
    --------
    >>> import torch
    >>> from vbtta.augment import Identity
    >>> dataset = [{"image": torch.zeros(2, 8, 8), "label": torch.zeros(1, 8, 8)} for _ in range(3)]
    >>> collect_dataset(torch.nn.Identity(), dataset, [Identity()], positions=20)
    (ViewPredictions(N=60, K=1, C=2: identity), LabelSets(60 labels of 60 instances))
    """

    def load(i: int) -> tuple[Any, Any]:
        item = dataset[i]
        parts = (item[image], item[label])  # MONAI's tensors hold metadata, others are plain
        values, target = (part.as_tensor() if hasattr(part, "as_tensor") else part for part in parts)
        return values, (target[0] if len(target) == 1 else target).cpu().numpy()

    if inferer is None:
        return collect_items(network, len(dataset), load, views, **options)
    import torch

    from vbtta.adapters.torch import evaluating

    with evaluating(network), torch.no_grad():
        return collect_items(lambda batch: inferer(batch, network), len(dataset), load, views, **options)
