"""A rank in a debugger is known as such, and ``--debugger`` takes a rank or none."""

from __future__ import annotations

import io
import pdb
import sys

import pytest

from echelon.base.errors import ConfigError
from echelon.cli.launch import _outputs, command
from echelon.status.call_site import StackSummary, summarize_stack


def test_only_a_program_stopped_by_a_debugger_is_detected() -> None:
    seen: list[StackSummary] = []

    class Prompt(io.StringIO):
        def readline(self, _size: int | None = -1, /) -> str:
            seen.append(summarize_stack(sys._getframe()))
            return "c\n"

    traced = sys.gettrace()
    pdb.Pdb(stdin=Prompt(), stdout=io.StringIO(), nosigint=True).set_trace()
    after = summarize_stack(sys._getframe())
    sys.settrace(traced)
    assert [sight.debugs for sight in seen] == [True]
    assert not after.debugs


@pytest.mark.parametrize(
    ("args", "rank"),
    [
        (["--debugger", "train.py", "7"], 0),
        (["--debugger", "1", "train.py"], 1),
        (["--debugger=1", "train.py"], 1),
        (["--num_processes", "2", "--debugger", "--cpu", "train.py"], 0),
        (["-t", "3", "--debugger", "-m", "train"], 0),
        (["train.py", "--debugger"], None),
        (["-m", "train", "--debugger", "x"], None),
    ],
)
def test_the_flag_accepts_a_rank_or_none_and_keeps_script_arguments(args: list[str], rank: int | None) -> None:
    ctx = command.make_context("launch", list(args), token_normalize_func=lambda name: name.replace("_", "-"))
    assert ctx.params["debugger"] == rank
    own = args[args.index("train.py") + 1 :] if "train.py" in args else args[args.index("train") + 1 :]
    assert list(ctx.params["args"]) == own


def test_the_debugged_rank_has_the_terminal_and_other_ranks_log() -> None:
    def places(**flags: object) -> list[str]:
        given = {"tee": None, "redirects": None, "log_dir": None, "debugger": 1, **flags}
        return [_outputs(given, 2).destination(rank, "stdout") for rank in (0, 1)]

    assert places() == ["both", "terminal"]
    assert places(log_dir="logs") == ["file", "terminal"]
    assert places(tee="0") == ["terminal", "terminal"]
    assert places(debugger=None) == ["terminal", "terminal"]
    with pytest.raises(ConfigError, match="there is no rank 1"):
        _outputs({"tee": None, "redirects": None, "log_dir": None, "debugger": 1}, 1)
