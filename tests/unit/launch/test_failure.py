"""What the failure report says to do about torch's own messages, and which attribute a DataLoader could not send to its workers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, Subset

from echelon.launch.failures.failure import ErrorRecord, RankEnd, explain
from echelon.launch.local.worker import ERROR_FILE, Recorder
from echelon.launch.unpicklable import unpicklable_part


class _Images(Dataset[int]):
    def __init__(self, **more: Any) -> None:
        self.values = list(range(4))  # a tensor would stay in shared memory
        self.__dict__.update(more)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def _error_of(**options: Any) -> BaseException:
    # Where there is fork, nothing is sent: on macOS, Windows and from Python 3.14 on it is.
    loader: DataLoader[Any] = DataLoader(num_workers=1, multiprocessing_context="spawn", **options)
    with (
        pytest.raises(Exception, match=r"pickle|local object") as caught,
        pytest.warns(UserWarning, match="pickle error"),
    ):
        iter(loader)
    return caught.value


def _say(error: BaseException, folder: Path) -> tuple[str, str]:
    recorder = Recorder(str(folder))
    recorder.add(error, where="main")
    (record,) = json.loads((folder / ERROR_FILE).read_text())
    found = ErrorRecord(time_ns=1, type=record["type"], message=record["message"])
    what, _, do = explain([RankEnd(rank=0, exit_code=1, record=found)], logs="above")
    return what, do


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dataset": _Images(lock=threading.Lock())}, "dataset.lock, of class _Images (a lock)"),
        (
            {"dataset": Subset(_Images(files={"a": threading.Lock()}), [0])},
            "dataset.dataset.files['a'], of class dict",
        ),
        ({"dataset": _Images(), "collate_fn": lambda batch: batch}, "collate_fn (<lambda>)"),
    ],
)
def test_the_attribute_that_cannot_be_pickled_is_named(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    what, do = _say(_error_of(**options), tmp_path)
    assert part in what
    assert "make the object picklable for the DataLoader workers" in do
    assert "on first use in __getitem__" in do


def test_other_errors_are_unchanged() -> None:
    assert unpicklable_part(ValueError("bad sample")) == ""
    assert unpicklable_part(TypeError("cannot pickle a cucumber")) == ""
