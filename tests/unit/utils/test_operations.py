"""Accelerate's functions on nested data; every expected value is written out."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch

from echelon.base.errors import UsageError
from echelon.utils import (
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

Pair = namedtuple("Pair", "a b c")


class _Batch(UserDict[str, Any]):
    """As a tokenizer's: its ``to`` takes the device only."""

    def to(self, device: str) -> tuple[str, str]:
        return ("moved", device)


def _double(tensor: torch.Tensor, times: int = 2) -> torch.Tensor:
    return tensor * times


def test_containers_keep_their_types_and_other_leaves_stay() -> None:
    data = {"a": (torch.tensor(1), "x"), "b": [torch.tensor(2)], "c": Pair(torch.tensor(3), 4, None)}
    result = recursively_apply(_double, data, times=3)
    assert result == {"a": (torch.tensor(3), "x"), "b": [torch.tensor(6)], "c": Pair(torch.tensor(9), 4, None)}
    assert isinstance(result["c"], Pair)


def test_another_leaf_is_an_error_of_both_kinds_when_asked_for() -> None:
    with pytest.raises(TypeError, match="_double does not accept str") as caught:
        recursively_apply(_double, {"a": "text"}, error_on_other_type=True)
    assert isinstance(caught.value, UsageError)
    assert recursively_apply(_double, {"a": "text"}) == {"a": "text"}


def test_test_type_chooses_the_leaves() -> None:
    assert recursively_apply(lambda n: n + 1, [1, "a"], test_type=lambda leaf: isinstance(leaf, int)) == [2, "a"]


def test_honor_type_fills_a_named_tuple_field_by_field() -> None:
    assert honor_type(Pair(0, 0, 0), (n for n in (1, 2, 3))) == Pair(1, 2, 3)
    assert honor_type([0], (n for n in (1, 2))) == [1, 2]
    assert is_namedtuple(Pair(1, 2, 3))
    assert not is_namedtuple((1, 2))


def test_tensors_move_and_skipped_keys_stay() -> None:
    data = {"a": torch.ones(2), "keep": torch.ones(1), "inside": [{"keep": torch.ones(1), "n": 1}]}
    moved = send_to_device(data, "meta", skip_keys="keep")
    assert (moved["a"].device.type, moved["keep"].device.type) == ("meta", "cpu")
    assert (moved["inside"][0]["keep"].device.type, moved["inside"][0]["n"]) == ("cpu", 1)


def test_a_batch_with_a_to_method_is_moved_by_it() -> None:
    assert send_to_device(_Batch(x=1), "meta") == ("moved", "meta")


def test_a_structure_is_described_and_rebuilt() -> None:
    described = get_data_structure({"a": torch.zeros(2, 3, dtype=torch.int32), "b": [torch.tensor(1.0), "x"]})
    assert described["a"] == TensorInformation(shape=torch.Size([2, 3]), dtype=torch.int32)
    assert is_tensor_information(described["a"])
    assert [is_torch_tensor(x) for x in (torch.ones(1), described["a"], [1.0], None)] == [True, False, False, False]
    made = initialize_tensors(described)
    assert (made["a"].shape, made["a"].dtype, made["b"][0].shape, made["b"][1]) == ((2, 3), torch.int32, (), "x")


def test_the_batch_size_is_of_the_first_tensor() -> None:
    assert find_batch_size({"a": [torch.zeros(5, 2)], "b": torch.zeros(1)}) == 5


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ([], ValueError, "an empty list has no batch size"),
        ({}, ValueError, "an empty dict"),
        (["x"], TypeError, "but got str"),
    ]
    + [(torch.tensor(1), ValueError, "a 0-d tensor has no batch size")],
)
def test_data_without_a_batch_size_raises(data: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        find_batch_size(data)
    assert ignorant_find_batch_size(data) is None


def test_tensors_become_lists() -> None:
    data = (torch.tensor([1, 2]), {"h": torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)}, "x")
    assert listify(data) == ([1, 2], {"h": [0.5]}, "x")


def test_the_device_is_of_the_first_tensor() -> None:
    assert find_device({"n": 1, "t": [torch.ones(1, device="meta")]}) == torch.device("meta")
    assert find_device({"n": 1}) is None


def test_slices_and_joins() -> None:
    data = {"x": torch.arange(6), "y": [torch.arange(6) * 10]}
    parts = [slice_tensors(data, slice(0, 2), 0, 2), slice_tensors(data, slice(4, 6))]
    joined = concatenate(parts)
    assert joined["x"].tolist() == [0, 1, 4, 5]
    assert joined["y"][0].tolist() == [0, 10, 40, 50]
    assert concatenate([torch.ones(2, 1), torch.zeros(2, 1)], dim=1).tolist() == [[1, 0], [1, 0]]
    assert concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="str objects cannot be concatenated"):
        concatenate(["a", "b"])


@pytest.mark.parametrize(
    ("rows", "parts", "padded"),
    # accelerate pads 4 rows for 4 processes to 7, and 6 rows for 2 to 7, which cannot be cut equally.
    [(5, 4, 8), (10, 4, 12), (4, 4, 4), (6, 2, 6), (1, 4, 4)],
)
def test_a_batch_is_padded_to_equal_parts(rows: int, parts: int, padded: int) -> None:
    result = pad_input_tensors([torch.ones(rows, 2)], rows, parts)[0]
    assert result.shape == (padded, 2)
    assert result.sum() == rows * 2


def test_half_precision_becomes_float32_and_the_rest_stays() -> None:
    data = OrderedDict(
        h=torch.ones(1, dtype=torch.float16), d=torch.ones(1, dtype=torch.float64), n=torch.ones(1, dtype=torch.int8)
    )
    result = convert_to_fp32(data)
    assert isinstance(result, OrderedDict)
    assert [value.dtype for value in result.values()] == [torch.float32, torch.float64, torch.int8]


def test_a_forward_with_float32_outputs_keeps_its_name_and_pickles() -> None:
    forward = convert_outputs_to_fp32(_half)
    assert forward(1).dtype == torch.float32
    assert (forward.__name__, forward.__wrapped__) == ("_half", _half)  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(forward))(1).dtype == torch.float32


def _half(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.bfloat16)
