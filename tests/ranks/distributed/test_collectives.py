"""Collectives of ``echelon.distributed`` on nested data, against references in plain Python lists."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.base.errors import DesyncError, UsageError
from echelon.distributed import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    mean_over_ranks,
    pad_across_processes,
    reduce,
)
from tests.harness import errors_on_ranks, run_on_ranks

WORLDS = [1, 2, 3]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = [torch.bool, *INTEGERS, *FLOATS, torch.complex64]
Pair = namedtuple("Pair", ["left", "right"])


def _values(rank: int, count: int) -> list[int]:
    """Return small numbers that differ between ranks and are exact in every tested dtype."""
    return [(3 * rank + 2 * i) % 7 for i in range(count)]


def _tensor(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(_values(rank, count)).to(dtype)


def _as_list(tensor: torch.Tensor) -> list[Any]:
    return [complex(x).real if tensor.is_complex() else float(x) for x in tensor.reshape(-1).tolist()]


def _gather_each_dtype() -> list[tuple[str, list[Any], list[int], str]]:
    rank = dist.get_rank()
    seen = []
    for dtype in ALL:
        result = gather(_tensor(rank, 6, dtype).reshape(2, 3))
        seen.append((str(dtype), _as_list(result), list(result.shape), str(result.dtype)))
    return seen


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_concatenates_every_dtype_in_rank_order(world_size: int) -> None:
    for seen in run_on_ranks(_gather_each_dtype, world_size=world_size):
        for name, values, shape, dtype in seen:
            expected = [v for rank in range(world_size) for v in _values(rank, 6)]
            if name == "torch.bool":
                expected = [float(v != 0) for v in expected]
            assert values == expected, name
            assert (shape, dtype) == ([2 * world_size, 3], name)


def _gather_nested() -> Any:
    rank = dist.get_rank()
    data = {
        "pair": Pair(torch.tensor([rank]), [torch.tensor([[float(rank)]]), (torch.tensor(rank),)]),
        "ordered": OrderedDict(empty=torch.zeros(0, 4), strided=torch.arange(6).reshape(2, 3).t()[:, rank : rank + 1]),
    }
    result = gather(data)
    assert type(result["pair"]) is Pair
    assert type(result["ordered"]) is OrderedDict
    assert type(result["pair"].right) is list
    assert type(result["pair"].right[1]) is tuple
    return {
        "left": result["pair"].left.tolist(),
        "matrix": result["pair"].right[0].tolist(),
        "scalar": result["pair"].right[1][0].tolist(),
        "empty": list(result["ordered"]["empty"].shape),
        "strided": result["ordered"]["strided"].tolist(),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_gather_keeps_the_containers_of_nested_data(world_size: int) -> None:
    ranks = range(world_size)
    for result in run_on_ranks(_gather_nested, world_size=world_size):
        assert result == {
            "left": list(ranks),
            "matrix": [[float(r)] for r in ranks],
            "scalar": list(ranks),
            "empty": [0, 4],
            "strided": [[i + 3 * r] for r in ranks for i in range(3)],
        }


def _reduce_each_dtype() -> list[tuple[str, str, list[Any], str]]:
    rank = dist.get_rank()
    seen = []
    for dtype in ALL:
        for reduction in ("sum", "mean"):
            local = _tensor(rank, 5, dtype)
            before = local.clone()
            result = reduce({"x": (local, torch.ones((), dtype=dtype))}, reduction)["x"]
            assert torch.equal(local, before), "the input must stay"
            assert result[1].dim() == 0
            seen.append((str(dtype), reduction, _as_list(result[0]) + _as_list(result[1]), str(result[0].dtype)))
    return seen


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_sums_and_averages_every_dtype(world_size: int) -> None:
    for seen in run_on_ranks(_reduce_each_dtype, world_size=world_size):
        for name, reduction, values, dtype in seen:
            columns = [[_values(rank, 5)[i] for rank in range(world_size)] for i in range(5)] + [[1] * world_size]
            if name == "torch.bool":
                columns = [[int(v != 0) for v in column] for column in columns]
            expected = [sum(column) / (world_size if reduction == "mean" else 1) for column in columns]
            # Means by 3 are rounded once to the dtype: half an ulp of the largest value, 6.
            tolerance = {"torch.float16": 2e-3, "torch.bfloat16": 2e-2}.get(name, 1e-6)
            assert values == pytest.approx(expected, abs=tolerance), (name, reduction)
            is_integer = name == "torch.bool" or "int" in name
            wanted = {"sum": "torch.int64", "mean": "torch.float32"}[reduction] if is_integer else name
            assert dtype == wanted, (name, reduction)


def _bf16_sum_of_many() -> float:
    return float(reduce(torch.tensor(256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16), "sum").item())


def test_bfloat16_is_summed_in_float32() -> None:
    # In bfloat16 256 + 1 = 256 at each step, so adding 1 twice would leave 256; in float32 it is 258.
    assert run_on_ranks(_bf16_sum_of_many, world_size=3) == [258.0] * 3


def _scaled() -> tuple[list[float], list[float], list[float], list[int]]:
    rank = dist.get_rank()
    return (
        reduce(torch.tensor([1.0 + rank]), "mean", 4.0).tolist(),
        reduce(torch.tensor([1.0 + rank]), "sum", 4.0).tolist(),
        mean_over_ranks([torch.tensor([2.0 * rank])])[0].tolist(),
        reduce(torch.tensor([rank]), "none").tolist(),
    )


def test_reduce_scales_means_and_sums() -> None:
    assert run_on_ranks(_scaled, world_size=2) == [([6.0], [12.0], [1.0], [0]), ([6.0], [12.0], [1.0], [1])]


def _broadcast_each_dtype(source: int) -> list[Any]:
    rank = dist.get_rank()
    seen = []
    for dtype in ALL:
        local = {"x": [_tensor(rank, 4, dtype).reshape(2, 2).t(), torch.zeros(0, dtype=dtype), torch.tensor(rank)]}
        result = broadcast(local, from_process=source)
        seen.append((_as_list(result["x"][0].t()), list(result["x"][1].shape), result["x"][2].item()))
    return seen


@pytest.mark.parametrize(("world_size", "source"), [(1, 0), (2, 1), (3, 2)])
def test_broadcast_gives_every_rank_the_tensors_of_the_source(world_size: int, source: int) -> None:
    for seen in run_on_ranks(_broadcast_each_dtype, source, world_size=world_size):
        assert seen[0] == ([float(v != 0) for v in _values(source, 4)], [0], source)
        assert seen[1:] == [([float(v) for v in _values(source, 4)], [0], source)] * (len(ALL) - 1)


def _objects() -> Any:
    rank = dist.get_rank()
    listed = broadcast_object_list([{"rank": rank}, "text" * rank], from_process=dist.get_world_size() - 1)
    return gather_object([f"a{rank}", rank]), gather_object({"rank": rank}), gather_object(f"r{rank}"), listed


@pytest.mark.parametrize("world_size", WORLDS)
def test_objects_are_gathered_and_broadcast(world_size: int) -> None:
    last = world_size - 1
    expected = (
        [item for r in range(world_size) for item in (f"a{r}", r)],
        [{"rank": r} for r in range(world_size)],
        [f"r{r}" for r in range(world_size)],
        [{"rank": last}, "text" * last],
    )
    assert run_on_ranks(_objects, world_size=world_size) == [expected] * world_size


def _pad_and_gather(dim: int, first: bool) -> Any:
    rank = dist.get_rank()
    ragged = torch.full((rank + 1, 2), rank + 1) if dim == 0 else torch.full((2, rank), rank + 1)
    data = {"x": ragged, "scalar": torch.tensor(float(rank))}
    return gather(pad_across_processes(data, dim=dim, pad_index=-1, pad_first=first))["x"].tolist()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("first", [False, True])
def test_unequal_first_dimensions_are_padded_to_the_largest(world_size: int, first: bool) -> None:
    expected = []
    for rank in range(world_size):
        real, padding = [[rank + 1] * 2] * (rank + 1), [[-1] * 2] * (world_size - rank - 1)
        expected += padding + real if first else real + padding
    assert run_on_ranks(_pad_and_gather, 0, first, world_size=world_size) == [expected] * world_size


def test_an_empty_tensor_is_padded_along_another_dimension() -> None:
    assert run_on_ranks(_pad_and_gather, -1, False, world_size=2) == [[[-1], [-1], [2], [2]]] * 2


def _unequal(what: str) -> None:
    rank = dist.get_rank()
    if what == "shape":
        gather({"loss": torch.zeros(2 + rank)})
    elif what == "dtype":
        reduce([torch.zeros(2, dtype=torch.float64 if rank else torch.float32)])
    elif what == "structure":
        broadcast((torch.zeros(1),) if rank else [torch.zeros(1)])
    elif what == "operation":
        gather(torch.zeros(1)) if rank else reduce(torch.zeros(1))
    elif what == "length":
        broadcast_object_list([1] * (rank + 1))
    elif what == "lists":
        gather_object([rank] if rank else rank)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("shape", ["rank 0: gather {'loss': float32[2]}", "rank 1: gather {'loss': float32[3]}"]),
        ("dtype", ["rank 0: reduce(mean) [float32[2]]", "rank 1: reduce(mean) [float64[2]]"]),
        ("structure", ["rank 0: broadcast(from_process=0) [float32[1]]", "(float32[1])"]),
        ("operation", ["rank 0: reduce(mean) float32[1]", "rank 1: gather float32[1]"]),
        ("length", ["list of 1", "list of 2"]),
        ("lists", ["rank 0: int", "rank 1: list"]),
    ],
)
def test_differences_between_ranks_are_listed_on_every_rank(what: str, texts: list[str]) -> None:
    for text in errors_on_ranks(DesyncError, _unequal, what, world_size=2, num_errors=2):
        assert all(part in text for part in texts)


def _misuse(what: str) -> None:
    if what == "object":
        gather({"loss": 0.5})
    elif what == "reduction":
        reduce(torch.zeros(1), "median")  # type: ignore[arg-type]
    elif what == "source":
        broadcast(torch.zeros(1), from_process=2)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("object", "but got float ({'loss': float})"),
        ("reduction", "reduction must be 'mean', 'sum', 'max' or 'none', but got 'median'"),
        ("source", "from_process=2 is not one of the group's ranks [0, 1]"),
    ],
)
def test_errors_for_misuse_explain_the_problem_and_the_remedy(what: str, text: str) -> None:
    for error in errors_on_ranks(UsageError, _misuse, what, world_size=2):
        assert text in error
        assert "do:" in error


def test_without_a_process_group_every_collective_is_the_identity() -> None:
    assert not dist.is_initialized()
    tensor = torch.tensor([1, 2])
    assert gather({"x": tensor})["x"].tolist() == [1, 2]
    assert gather(torch.tensor(3)).tolist() == [3]
    assert reduce(tensor, "mean").tolist() == [1.0, 2.0]
    assert broadcast(tensor).tolist() == [1, 2]
    assert gather_object([1, 2]) == [1, 2]
    assert gather_object("a") == ["a"]
    assert pad_across_processes(tensor).tolist() == [1, 2]


def _gather_one_of_a_column() -> list[float]:
    found = gather(torch.full((1, 7), float(dist.get_rank()))[:, 3])
    assert isinstance(found, torch.Tensor)
    return found.tolist()


def test_a_view_of_a_larger_tensor_is_gathered() -> None:
    assert run_on_ranks(_gather_one_of_a_column) == [[0.0, 1.0]] * 2
