"""The collectives of ``echelon.utils`` on one and two ranks, with accelerate's defaults and meaning."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from echelon import utils
from echelon.base.errors import DesyncError
from echelon.distributed import collectives as checks
from echelon.utils import operations
from tests.harness import run_on_ranks


def _rank() -> int:
    return dist.get_rank()


def test_one_process_gets_its_input_back() -> None:
    tensor = torch.tensor(3)
    data = {"a": tensor}
    assert utils.gather(data) is data
    assert utils.gather_object({"any": 1}) == {"any": 1}
    assert utils.broadcast(tensor) is tensor
    assert utils.broadcast_object_list([1]) == [1]
    assert utils.pad_across_processes(data) is data
    reduced = utils.reduce(torch.tensor([1.0, 2.0]))
    assert reduced.tolist() == [1.0, 2.0]
    assert utils.copy_tensor_to_devices(tensor).item() == 3


def _collect() -> dict[str, Any]:
    rank = _rank()
    mine = torch.tensor([float(rank), 10.0])
    sent = {"x": torch.full((2,), float(rank)), "y": [torch.tensor(rank)]}
    returned = utils.broadcast(sent, from_process=1)
    objects = utils.broadcast_object_list(["zero", 0] if rank == 0 else [None, None])
    padded = utils.pad_across_processes(torch.ones(rank + 1, dtype=torch.int64), pad_index=-1)
    first = utils.pad_across_processes(torch.ones(rank + 1, dtype=torch.int64), pad_index=-1, pad_first=True)
    return {
        "gather": utils.gather(tensor={"a": torch.tensor(rank)})["a"].tolist(),
        "gather_object": utils.gather_object(object=[f"r{rank}"]),
        "mean": utils.reduce(mine).tolist(),
        "sum": utils.reduce(mine, "sum").tolist(),
        "max": utils.reduce(tensor=mine, reduction="max").tolist(),
        "max_int": utils.reduce(torch.tensor([rank, 5 - rank]), reduction="max").tolist(),
        "in_place": (returned is sent, sent["x"].tolist(), sent["y"][0].item()),
        "objects": objects,
        "padded": padded.tolist(),
        "first": first.tolist(),
        "copied": utils.copy_tensor_to_devices(torch.arange(3.0) if rank == 1 else None).tolist(),
    }


def test_two_ranks_collect_with_accelerates_defaults() -> None:
    results = run_on_ranks(_collect, world_size=2)
    shared = {
        "gather": [0, 1],
        "gather_object": ["r0", "r1"],
        "mean": [0.5, 10.0],
        "sum": [1.0, 20.0],
        "max": [1.0, 10.0],
        "max_int": [1, 5],
        "in_place": (True, [1.0, 1.0], 1),
        "objects": ["zero", 0],
        "copied": [0.0, 1.0, 2.0],
    }
    assert results[0] == {**shared, "padded": [1, -1], "first": [-1, 1]}
    assert results[1] == {**shared, "padded": [1, 1], "first": [1, 1]}


def _disagree(debug: bool) -> list[str]:
    from echelon.utils.environment import patch_environment

    rank, texts = _rank(), []
    with patch_environment(ACCELERATE_DEBUG_MODE=debug):
        for operation in (utils.gather, utils.reduce, utils.broadcast):
            with pytest.raises(operations.DistributedOperationException) as caught:
                operation({"a": torch.zeros(rank + 1)})
            texts.append(str(caught.value))
        with pytest.raises(operations.DistributedOperationException):
            utils.pad_across_processes(torch.zeros([1] * (rank + 1)))
    return texts


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_that_disagree_get_the_values_of_all_ranks(debug: bool) -> None:
    assert operations.DistributedOperationException is DesyncError
    for texts in run_on_ranks(_disagree, debug, world_size=2):
        for text, name in zip(texts, ("gather", "reduce(mean)", "broadcast(from_process=0)")):
            assert text.startswith(f"{name}: the ranks do not pass the same structure")
            assert "rank 0: " + name + " {'a': float32[1]}" in text
            assert "rank 1: " + name + " {'a': float32[2]}" in text


def _beside_another_backend(debug: bool) -> str:
    backends = {"cpu": "gloo", "cuda": "nccl"}
    with patch.object(checks, "backends_of", lambda group: backends), utils.patch_environment(ECHELON_DEBUG=int(debug)):
        try:
            checks.check_same("op", f"float32[{_rank()}]", group=None)
        except DesyncError as error:
            return str(error)
    return "not checked"


def test_debug_mode_enables_shape_checks_for_backends_other_than_gloo() -> None:
    assert run_on_ranks(_beside_another_backend, False, world_size=2) == ["not checked"] * 2
    for text in run_on_ranks(_beside_another_backend, True, world_size=2):
        assert text.startswith("op: the ranks do not pass the same structure\n    rank 0: op float32[0]\n")


def _decorated() -> tuple[str, str]:
    @operations.verify_operation
    def own_collective(tensor: torch.Tensor) -> str:
        return "ran"

    @operations.chained_operation
    def outer(tensor: torch.Tensor) -> Any:
        return own_collective(tensor)

    unequal = torch.zeros(_rank() + 1)
    without = own_collective(unequal)
    with utils.patch_environment(ECHELON_DEBUG=1), pytest.raises(DesyncError) as caught:
        outer(unequal)
    return without, str(caught.value).split("\n", 1)[0]


def test_debug_mode_verifies_custom_operations_and_names_the_outer_one() -> None:
    without, text = run_on_ranks(_decorated, world_size=2)[1]
    assert without == "ran"
    assert "outer: " in text
    assert "own_collective: the ranks do not pass the same structure" in text


def _wrong_leaf() -> str:
    with pytest.raises(TypeError) as caught:
        utils.gather({"a": "text"})
    return str(caught.value)


def test_other_leaves_are_a_type_error_that_names_the_operation() -> None:
    assert run_on_ranks(_wrong_leaf, world_size=2)[0].startswith("gather does not accept str (in {'a': str})")


def _copy_from(owners: tuple[int, ...]) -> str:
    with pytest.raises(DesyncError) as caught:
        utils.copy_tensor_to_devices(torch.ones(1) if _rank() in owners else None)
    return str(caught.value)


@pytest.mark.parametrize(("owners", "text"), [((), "but 0 did"), ((0, 1), r"but 2 did (ranks [0, 1])")])
def test_a_tensor_is_copied_from_exactly_one_rank(owners: tuple[int, ...], text: str) -> None:
    assert text in run_on_ranks(_copy_from, owners, world_size=2)[0]


def _nested() -> tuple[bool, list[int]]:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.warns(operations.CannotPadNestedTensorWarning, match="are not padded"):
        result = utils.pad_across_processes([nested, torch.ones(_rank() + 1)])
    return result[0] is nested, list(result[1].shape)


def test_a_nested_tensor_is_kept_and_other_tensors_are_padded() -> None:
    assert run_on_ranks(_nested, world_size=2) == [(True, [2]), (True, [2])]


def _on_main_only() -> tuple[bool, bool]:
    with open(os.devnull, "w") as nowhere:
        bars = [utils.tqdm(range(2), file=nowhere), utils.tqdm(range(2), main_process_only=False, file=nowhere)]
        hidden = [bool(bar.disable) for bar in bars]
        for bar in bars:
            bar.close()
    return hidden[0], hidden[1]


def test_the_progress_bar_shows_on_local_rank_zero_only() -> None:
    assert run_on_ranks(_on_main_only, world_size=2) == [(False, False), (True, False)]


def test_a_progress_bar_with_a_bool_first_is_rejected() -> None:
    with pytest.raises(ValueError, match="the first argument must be an iterable"):
        utils.tqdm(True, range(2))
