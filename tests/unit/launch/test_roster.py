"""Which machines may take part in a run, which are refused, and how ranks are numbered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.launch.multinode.roster import NodeInfo, describe_missing, in_rank_order, refusal

A = NodeInfo(
    uid="a",
    host="one",
    address="10.0.0.1",
    machine_rank=0,
    num_processes=2,
    min_nodes=2,
    max_nodes=2,
    run_id="r",
    versions={"torch": "2.13.0"},
    settings={"mixed_precision": "no (from file a.yaml:3)"},
)
B = replace(
    A,
    uid="b",
    host="two",
    address="10.0.0.2",
    machine_rank=1,
    num_processes=3,
    settings={"mixed_precision": "no (from flag --mp)"},
)


def test_two_machines_that_agree_are_admitted() -> None:
    assert refusal(B, [A], A) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"machine_rank": 0}, "one (10.0.0.1) already has machine rank 0"),
        ({"machine_rank": 2}, "machine rank 2 is out of range for 2 machines"),
        ({"run_id": "s"}, "this machine expects run 's', but the rendezvous host is running 'r'"),
        ({"min_nodes": 3, "max_nodes": 3}, "this machine expects 3 machines, but one expects 2"),
        (
            {"versions": {"torch": "2.12.0"}},
            "different versions: torch is 2.12.0 on the joining machine and 2.13.0 on one",
        ),
        (
            {"settings": {"mixed_precision": "bf16 (from flag --mp)"}},
            "different settings: mixed_precision is bf16 (from flag --mp) on the joining machine and no (from file a.yaml:3) on one",
        ),
        (
            {"settings": {}},
            "different settings: mixed_precision is not set on the joining machine and no (from file a.yaml:3) on one",
        ),
    ],
)
def test_each_mistake_is_named(change: dict[str, object], what: str) -> None:
    error = refusal(replace(B, **change), [A], A)  # type: ignore[arg-type]
    assert error is not None
    assert error.what == what
    assert "two (10.0.0.2" in str(error.where)
    assert error.do


def test_ranks_are_numbered_by_the_machine_ranks_then_as_before_then_the_first_first() -> None:
    def ordered(*infos: NodeInfo, before: str = "") -> str:
        return "".join(info.uid for info in in_rank_order(infos, last_order=before, first="b"))

    assert ordered(B, A) == "ab"
    free = [replace(info, machine_rank=None) for info in (A, B)]
    c = replace(free[0], uid="c")
    assert ordered(*free, c) == "bac"
    assert ordered(*free, c, before="bca") == "bca"


def test_missing_machines_are_named_by_rank() -> None:
    assert describe_missing([A], min_nodes=2, max_nodes=2) == (
        "1 of 2 machines have joined: one (10.0.0.1, machine rank 0); missing machine ranks: 1"
    )
    free = replace(A, machine_rank=None)
    assert describe_missing([free], min_nodes=1, max_nodes=4) == "1 of at least 1 machines have joined: one (10.0.0.1)"
