"""Ray on a machine that may be busy."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

STORE = 80 << 20  # bytes of an object store: the least Ray takes


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 seconds to start, which a busy machine may not have; nothing of ours runs in it yet."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out" not in str(error):
                raise
        forget_processes()
    return start()


def forget_processes() -> None:
    """Let go of what Ray started, here rather than in a test that comes later: Python warns of what still runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
