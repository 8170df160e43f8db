"""The same jobs on a cluster, by Ray: collecting views and fitting weights."""

__all__ = ["collect_views", "fit_policy"]

from vbtta.ray.collect import collect_views
from vbtta.ray.fit import fit_policy
