"""MONAI: an inferer that applies a policy.

A :class:`vbtta.TTAModule` is the `network` of any inferer; :class:`PolicyInferer` makes it of the network that an
evaluator or a bundle passes on.
"""

__all__ = ["PolicyInferer"]

from collections.abc import Callable
from typing import Any

from vbtta.policy import Policy


class PolicyInferer:
    """An inferer whose network is the given one with the views of a policy.

    The result is the logarithm of the pooled probabilities by default: a softmax or argmax after it stays as it is. Of
    an inferer such as ``SlidingWindowInferer(roi_size)`` every window is predicted under the views. `options` are those
    of :class:`vbtta.TTAModule`, such as ``output="probability"``.
    """

    def __init__(self, inferer: Callable[..., Any], views: Any, policy: Policy, **options: Any) -> None:
        self.inferer, self.views, self.policy = inferer, views, policy
        default = {"output": "log_probability"} if policy.task == "classification" else {}
        self.options = default | options
        self._module: Any = None

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        """Maps of the inputs (B, channels, H, W) or (B, channels, D, H, W)."""
        from vbtta.module import TTAModule

        module = self._module  # another thread may call with another network meanwhile
        if module is None or module.network is not network:
            module = self._module = TTAModule(network, self.views, self.policy, **self.options)
        return self.inferer(inputs, module, *args, **kwargs)
