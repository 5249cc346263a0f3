"""Long operations show one bar, in a terminal or a notebook, on rank zero, and nothing elsewhere."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch

from echelon.base import progress as bars
from echelon.base.progress import progress_bar, shows_bars
from echelon.checkpoint.formats.merged_weights import merge_fsdp_weights
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.save import Content, begin_save
from echelon.world.world import World

_WORLD = World(
    rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, device=torch.device("cpu"), backend="gloo"
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _any_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even short operations show their bar, and no notebook's kernel is loaded by another test."""
    monkeypatch.setattr(bars, "_DELAY_S", 0.0)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


def test_a_terminal_shows_the_bar_and_removes_it() -> None:
    before = threading.active_count()
    with redirect_stderr(_Terminal()) as terminal, progress_bar("saving checkpoint_3", 1000) as advance:
        advance(400)
        advance(600)
        assert threading.active_count() == before  # a forked child would lack the thread
    text = terminal.getvalue()
    assert "saving checkpoint_3" in text
    assert "/1.00k" in text
    assert text.rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize(("rank", "stream"), [("1", _Terminal), ("0", io.StringIO)])
def test_other_ranks_and_other_outputs_show_nothing(
    rank: str, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with redirect_stderr(stream()) as shown, progress_bar("saving", 1000) as advance:
        advance(1000)
    assert shown.getvalue() == ""


def test_a_notebook_shows_bars_although_its_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not shows_bars()
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert shows_bars()
    monkeypatch.setattr(sys, "stderr", None)  # pythonw
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert not shows_bars()


def test_a_short_operation_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "_DELAY_S", 60.0)
    with redirect_stderr(_Terminal()) as terminal, progress_bar("saving", 1000) as advance:
        advance(1000)
    assert "saving" not in terminal.getvalue()


def test_saving_verifying_and_loading_report_all_their_bytes(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {}
    totals: dict[str, int] = {}

    @contextmanager
    def show(label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        totals[label], seen[label] = num_bytes, []
        yield seen[label].append

    tensors = {"models.0.w": torch.zeros(3 << 20), "models.0.b": torch.zeros(7)}
    folder = begin_save(
        tmp_path / "c", Content(tensors=tensors), world=_WORLD, gather=lambda payload: [payload]
    ).finish(show=show)
    checkpoint = Checkpoint(folder)
    assert checkpoint.problems(show=show) == []
    checkpoint.read_into({"models.0.w": torch.zeros(3 << 20)}, show=show)
    # The file also has a header, whose size is known only when it is written.
    assert totals["saving c"] <= sum(seen["saving c"]) <= totals["saving c"] + 1000
    assert len(seen["saving c"]) >= 3  # 12 MB in blocks of 4 MB
    assert sum(seen["verifying c"]) == totals["verifying c"]
    assert sum(seen["loading c"]) == totals["loading c"] == 12 << 20


def test_merging_shows_a_bar(tmp_path: Path) -> None:
    content = Content(tensors={"models.0.w": torch.zeros(1 << 20)}, objects={"models": [{}]})
    begin_save(tmp_path / "c", content, world=_WORLD, gather=lambda payload: [payload]).finish()
    with redirect_stderr(_Terminal()) as terminal:
        merge_fsdp_weights(tmp_path / "c", tmp_path / "out")
    assert "verifying c" in terminal.getvalue()
    assert "writing" in terminal.getvalue()
