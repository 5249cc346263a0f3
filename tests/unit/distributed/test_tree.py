"""Nested data of every kind: what is put together again has the type, the order and the attributes that it had."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from echelon.accelerator.metrics import gather_samples, own_samples
from echelon.base.errors import UsageError
from echelon.data.batch import join_batches, num_samples, slice_batch
from echelon.data.global_batch_slices import LastStep
from echelon.distributed.structure import send_batch_to_device
from echelon.distributed.tree import describe, leaves, map_tensors
from echelon.testing.model_outputs import OUTPUT_KINDS, OutputNote, items_of
from echelon.trainer.data import batches
from echelon.utils import (
    concatenate,
    convert_outputs_to_fp32,
    find_batch_size,
    find_device,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from echelon.world.world import World


def _made(kind: str, *, rows: int = 2) -> Any:
    half = torch.ones(rows, 3, dtype=torch.bfloat16)
    return OUTPUT_KINDS[kind](logits=half, hidden=(half * 2, half * 3), note=OutputNote(), missing=None)


@pytest.mark.parametrize("kind", OUTPUT_KINDS)
def test_a_container_keeps_its_type_order_and_other_values(kind: str) -> None:
    data = _made(kind)
    before = items_of(data)
    new = map_tensors(torch.Tensor.float, data)
    items = items_of(new)
    assert type(new) is type(data)
    assert list(items) == list(before)
    assert items["note"] is before["note"]
    assert items.get("missing") is None
    assert [leaf.dtype for leaf in leaves(new) if isinstance(leaf, torch.Tensor)] == [torch.float32] * 3
    assert items_of(data) == before  # it is another object
    assert all(items_of(data)[name] is value for name, value in before.items())
    assert map_tensors(lambda tensor: tensor, data) is data


@pytest.mark.parametrize("kind", OUTPUT_KINDS)
def test_every_function_supports_every_container(kind: str) -> None:
    data = _made(kind, rows=4)
    as_float = convert_outputs_to_fp32(lambda: data)()
    assert type(as_float) is type(data)
    assert items_of(as_float)["logits"].dtype == torch.float32
    for moved in (
        send_to_device(data, "meta"),
        batches.to_device(data, torch.device("meta")),
    ):
        assert type(moved) is type(data)
        assert items_of(moved)["hidden"][1].is_meta
        assert items_of(moved)["note"] is items_of(data)["note"]
    assert find_device(data) == torch.device("cpu")
    assert find_batch_size(data) == batches.batch_size(data) == 4
    assert num_samples(data) == (1 if kind == "nested" else 4)  # a list of objects is one of samples
    assert not items_of(batches.detach(map_tensors(torch.Tensor.requires_grad_, data)))["logits"].requires_grad
    for part in (slice_tensors(data, slice(1, 3)), batches.cut(data, rows=2, of=4)):
        assert type(part) is type(data)
        assert items_of(part)["logits"].shape == (2, 3)
    if kind != "nested":
        assert type(slice_batch(data, slice(1, 3))) is type(data)
        assert items_of(slice_batch(data, slice(1, 3)))["logits"].shape == (2, 3)
    assert "bfloat16[4, 3]" in describe(data)
    doubled = recursively_apply(lambda tensor: tensor * 2, data)
    assert type(doubled) is type(data)
    assert items_of(doubled)["logits"][0, 0] == 2
    of_tensors = OUTPUT_KINDS[kind](
        logits=torch.ones(2, 1), hidden=(torch.ones(2),), note=torch.ones(2), missing=torch.ones(2)
    )
    for joined in (concatenate([of_tensors, of_tensors]), batches.concatenate([of_tensors, of_tensors])):
        assert type(joined) is type(of_tensors)
        assert items_of(joined)["hidden"][0].shape == (4,)
    if kind != "nested":
        assert items_of(join_batches([of_tensors, of_tensors]))["logits"].shape == (4, 1)


@dataclass
class _Sample:
    boxes: torch.Tensor


def test_a_list_of_dataclasses_is_one_of_samples() -> None:
    """As before dataclasses were containers: targets of a detection, each with another number of boxes."""
    targets = [_Sample(torch.ones(n, 4)) for n in (1, 5, 2)]
    assert num_samples({"targets": targets}) == 3
    assert [len(t.boxes) for t in slice_batch(targets, slice(1, 3))] == [5, 2]
    last = LastStep(sizes=[3], real=[2])
    assert own_samples(targets, last, rank=0) == targets[:2]
    assert gather_samples(targets, last, world=World.current()) == targets[:2]


def test_of_several_names_for_a_tensor_all_are_replaced() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.ones(2, dtype=torch.bfloat16)
    output = transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=(logits,))
    new = map_tensors(torch.Tensor.float, output)
    assert new.logits is new["logits"] is new[0]
    assert new.past_key_values is new["past_key_values"]
    assert new.loss is None
    assert list(new) == ["logits", "past_key_values"]
    assert new.logits.dtype == new.past_key_values[0].dtype == torch.float32
    assert output.logits is logits
    assert pickle.loads(pickle.dumps(new)).logits.dtype == torch.float32
    encoding = transformers.BatchEncoding({"ids": torch.ones(2)}, encoding="kept", n_sequences=1)
    new = map_tensors(torch.Tensor.double, encoding)
    assert (type(new), new.ids.dtype, new.encodings, new.n_sequences) == (type(encoding), torch.float64, "kept", 1)


class _Annotated(list[Any]):
    __slots__ = ("__private", "source")

    def __init__(self, source: str, *items: Any) -> None:
        super().__init__(items)
        self.source = source
        self.__private = 1

    def private(self) -> int:
        return self.__private


class _Point(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> _Point:
        made = super().__new__(cls, (x, y))
        made.name = "kept"  # type: ignore[attr-defined]
        return made


@dataclass
class _Node:
    value: torch.Tensor
    parent: Any = None
    _cache: dict[str, Any] = field(default_factory=dict, init=False)


def test_subclasses_with_constructors_of_their_own() -> None:
    one = torch.ones(1)
    numbered = map_tensors(torch.Tensor.double, _Annotated("file", one, "x"))
    assert (type(numbered), numbered.source, numbered.private(), numbered[1]) == (_Annotated, "file", 1, "x")
    assert numbered[0].dtype == torch.float64
    point: Any = map_tensors(torch.Tensor.double, _Point(one, 2))
    assert (type(point), point[0].dtype, point[1], point.name) == (_Point, torch.float64, 2, "kept")
    largest = map_tensors(torch.Tensor.double, torch.ones(2, 2).max(dim=1))
    assert type(largest) is torch.return_types.max  # type: ignore[attr-defined, unused-ignore]
    packed = map_tensors(torch.Tensor.double, pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]))
    assert (type(packed), packed.data.dtype) == (PackedSequence, torch.float64)
    counted = map_tensors(torch.Tensor.double, defaultdict(list, a=one))
    assert counted["b"] == []
    ordered = OrderedDict(b=one, a=1)
    ordered.move_to_end("b")
    assert list(map_tensors(torch.Tensor.double, ordered)) == ["a", "b"]
    proxy = map_tensors(torch.Tensor.double, MappingProxyType({"a": one}))
    assert type(proxy) is MappingProxyType
    user = UserDict(a=one)
    user.extra = "kept"  # type: ignore[attr-defined]
    assert map_tensors(torch.Tensor.double, user).extra == "kept"
    assert torch.equal(user["a"], one)


def test_a_self_referencing_dataclass_terminates() -> None:
    node = _Node(torch.ones(1))
    node.parent = node
    node._cache["x"] = 1
    new = map_tensors(torch.Tensor.double, node)
    assert (new.value.dtype, new.parent, new._cache) == (torch.float64, node, {"x": 1})
    assert send_to_device(node, "meta").value.is_meta
    assert send_to_device(node, "cpu") is node


class _Movable:
    def to(self, device: Any) -> str:
        return f"moved to {device}"


def test_objects_in_a_dataclass_move_only_with_a_loaders_batch() -> None:
    movable = _Movable()
    node = _Node(torch.ones(1))
    node._cache["x"] = movable
    data = [node, movable]
    for moved, kept in (
        (send_to_device(data, "meta"), movable),
        (send_batch_to_device(data, torch.device("meta"), non_blocking=False), "moved to meta"),
    ):
        assert moved[0].value.is_meta
        assert moved[0]._cache == {"x": kept}
        assert moved[1] == "moved to meta"


class _Strict(UserDict[str, Any]):
    def __init__(self, a: torch.Tensor) -> None:
        super().__init__({"a": a})


class _Unmakeable(Mapping[str, Any]):
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._items = {"a": a, "b": b}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 2


def test_a_mapping_that_cannot_be_rebuilt_is_named() -> None:
    assert type(map_tensors(torch.Tensor.double, _Strict(torch.ones(1)))) is _Strict
    odd = _Unmakeable(torch.ones(1), torch.ones(1))
    assert map_tensors(lambda tensor: tensor, odd) is odd
    with pytest.raises(UsageError, match="cannot replace the tensors in a _Unmakeable") as caught:
        map_tensors(torch.Tensor.double, odd)
    assert "use a dict, a dataclass or a named tuple" in str(caught.value)


@dataclass(slots=True)
class _Slotted:
    logits: torch.Tensor


@dataclass
class _Counted(_Slotted):
    def __post_init__(self) -> None:
        self.num_rows = len(self.logits)  # no field


def test_a_dataclass_keeps_other_attributes() -> None:
    new = map_tensors(torch.Tensor.half, _Counted(torch.ones(2)))
    assert (new.logits.dtype, new.num_rows) == (torch.float16, 2)
