"""Small parts that everything uses: files that are whole or not there, and values in messages."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from vbtta import LabelSets, ViewPredictions
from vbtta._support.checks import positive, whole_number
from vbtta._support.files import atomic_path


@pytest.mark.parametrize("name", ["a" * 250, "ä" * 120])
def test_any_name_that_a_file_may_have_can_be_written(name: str, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic_path(tmp_path / name) as temporary:
            temporary.write_text("whole")
    finally:
        os.umask(mask)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_failures_name_the_target_and_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(FileNotFoundError) as found, atomic_path(target) as temporary:
        temporary.unlink()
    assert found.value.filename == str(target)
    with pytest.raises(FileNotFoundError) as found, atomic_path(target):
        (tmp_path / "other").read_text()
    assert found.value.filename == str(tmp_path / "other")
    assert list(tmp_path.iterdir()) == []


def test_messages_show_plain_values() -> None:
    with pytest.raises(ValueError, match=r"got -1.0$"):
        positive(scale=np.float64(-1))
    with pytest.raises(ValueError, match=r"got 2.5$"):
        whole_number("steps", np.float64(2.5), 1)
    views = ViewPredictions(np.zeros((2, 1, 1)), names=["identity"])
    with pytest.raises(ValueError, match=r"views \['flip'\] are not"):
        views.select(np.array(["flip"]))
    with pytest.raises(ValueError, match=r"got 'cow'$"):
        LabelSets.from_array(["1.0", "cow"]).continuous(1)
