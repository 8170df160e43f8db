"""The real packages: `make test-integrations` installs them; nothing is skipped here."""

import sys
from collections.abc import Generator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of other packages are no failures here; `make test` forbids those of vbtta."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped fails: every package is here."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


def load_torchvision() -> object:
    """Load torchvision, if need be without its compiled operators: a CPU build of torch cannot load CUDA's.

    Returns the library of schemas, which must live as long as they are needed: torchvision's Python code refers to
    both operators, and its transforms call neither.
    """
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

        return library
    return None


SCHEMAS = load_torchvision()
