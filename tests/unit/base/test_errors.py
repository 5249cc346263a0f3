"""Errors keep their ``what``, ``where`` and ``do`` when they are sent between processes."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest
import torch.distributed as dist

from echelon.base import errors
from echelon.base.errors import ConfigError, EchelonError, MissingExtraError, RankTimeoutError, SetupError
from tests.harness import RanksFailed, run_on_ranks

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def _fail() -> None:
    dist.barrier()
    raise SetupError("the address is taken", where="tcp://", do="free it")


def test_the_text_has_what_where_and_do_on_separate_lines() -> None:
    error = ConfigError("7 does not divide 8", where="flag --shards", do="use 4")
    assert str(error) == "7 does not divide 8\n  where: flag --shards\n  do:    use 4"


def test_unknown_lines_are_omitted() -> None:
    assert str(EchelonError("it broke")) == "it broke"
    assert str(EchelonError("it broke", do="mend it")) == "it broke\n  do:    mend it"


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_the_rank_precedes_the_location(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "3")
    assert EchelonError("it broke", where="config.yaml:4").where == "rank 3, config.yaml:4"
    assert EchelonError("it broke").where == "rank 3"


def test_a_rank_that_is_not_a_number_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "${RANK}")
    assert EchelonError("it broke").where is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_error_keeps_its_type_and_all_three_parts(
    monkeypatch: pytest.MonkeyPatch, kind: type[EchelonError]
) -> None:
    monkeypatch.setenv("RANK", "3")
    error = kind("it broke", where="here", do="mend it")
    monkeypatch.setenv("RANK", "0")  # it is read on another rank
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.where, copy.do) == ("it broke", "rank 3, here", "mend it")
    assert str(copy) == str(error) == "it broke\n  where: rank 3, here\n  do:    mend it"


def test_the_rank_of_the_process_group_is_used_and_reaches_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # the parent's own, which the ranks do not inherit
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_fail)
    assert [str(caught.value.errors[rank]).splitlines()[1] for rank in (0, 1)] == [
        "  where: rank 0, tcp://",
        "  where: rank 1, tcp://",
    ]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (SetupError, RuntimeError),
        (RankTimeoutError, TimeoutError),
        (MissingExtraError, ImportError),
    ],
)
def test_errors_can_be_caught_as_builtin_types(kind: type[EchelonError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="it broke"):
        raise kind("it broke")


def test_an_error_can_be_created_while_another_thread_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    assert EchelonError("what", where="here").where == "here"
