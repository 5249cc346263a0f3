"""Device maps, against sizes that are computed by hand: a float32 number has 4 bytes, a Linear(n, m) 4 * (n * m + m)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from echelon import infer_auto_device_map, init_empty_weights
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.big_models import device_memory
from echelon.utils import (
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    fallback_allocate,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_module_size_with_ties,
)
from echelon.utils.modeling import compute_module_sizes


class Block(nn.Module):
    """Two layers of 4 * (4 * 4 + 4) = 80 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    """600 bytes: an embedding of 4 * 10 * 4 = 160, two blocks of 160, a buffer of 40, and a head of 80."""

    def __init__(self, *, ties: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("table", torch.zeros(10))
        self.head = nn.Linear(4, 4)
        if ties:
            self.out = nn.Linear(4, 10, bias=False)
            self.out.weight = self.embed.weight


def _map(memory: dict[Any, Any], model: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    return infer_auto_device_map(Model() if model is None else model, max_memory=memory, **options)


def test_everything_is_in_one_place_if_it_fits() -> None:
    assert _map({0: 600}) == {"": 0}
    assert _map({0: 599}) != {"": 0}
    assert _map({"cpu": "1KB"}) == {"": "cpu"}
    assert _map({}) == {"": "disk"}


def test_layers_go_to_the_next_device_in_their_order() -> None:
    # Both devices keep room for the largest of the layers that follow, 80: 400 - 80 = 160 + 160, and 160 - 80 = 80.
    rest = dict.fromkeys(["blocks.1.down", "head", "table"], "disk")
    expected = {"embed": 0, "blocks.0": 0, "blocks.1.up": "cpu", **rest}
    assert _map({0: 400, "cpu": 160}) == expected


def test_a_block_is_not_split_and_the_reserve_is_a_whole_block() -> None:
    # The embedding needs 160 beside the reserve of 160; the first block 320 beside it.
    expected = {"embed": 0, "blocks.0": "cpu", "blocks.1": "disk", "head": "disk", "table": "disk"}
    assert _map({0: 400, "cpu": 320}, no_split_module_classes=["Block"]) == expected
    assert _map({0: 400, "cpu": 320}, no_split_module_classes="Block") == expected


def test_a_smaller_dtype_counts() -> None:
    # Half of 600 bytes; the embedding alone in float32: 80 more.
    assert _map({0: 300}, dtype="float16") == {"": 0}
    assert _map({0: 299}, dtype=torch.float16) != {"": 0}
    assert _map({0: 380}, dtype=torch.float16, special_dtypes={"embed.weight": torch.float32}) == {"": 0}
    assert _map({0: 379}, dtype=torch.float16, special_dtypes={"embed.weight": torch.float32}) != {"": 0}


def test_a_result_that_is_not_cleaned_lists_each_part() -> None:
    parts = _map({0: 600}, clean_result=False)
    assert parts == dict.fromkeys(["embed", "blocks", "head", "table"], 0)


def test_tied_parameters_are_placed_together_and_counted_once() -> None:
    model = Model(ties=True)
    assert compute_module_sizes(model)[""] == 600
    found = _map({0: 400, "cpu": 10_000}, model)
    assert found["embed"] == found["out"] == 0
    assert found["blocks.1"] == found["head"] == "cpu"
    size = get_module_size_with_ties(["out.weight"], 160, {"out": 200, "out.weight": 160}, [("out", model.out)])
    assert size == (200, ["out"], [model.out])


def test_a_parameter_of_the_model_itself_may_be_tied() -> None:
    model = Model()
    model.kept = model.head.weight
    # kept and head are tied, so they are one part of 64 + 16 bytes.
    found = _map({0: 300, "cpu": 10_000}, model)
    assert found["kept"] == found["head"]


def test_names_that_end_alike_are_not_taken_for_parts() -> None:
    model = nn.ModuleDict({"lin": nn.Linear(2, 2), "mylin": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight = model["mylin"].weight
    found = _map({0: 24 + 80 + 16 + 80, "cpu": 10_000}, model)
    assert found == {"": 0}


def test_with_fallback_a_smaller_part_is_placed_first() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(12, 12), nn.Linear(4, 4))  # 440, 624 and 80 bytes
    memory = {0: 1000, "cpu": 10_000}  # 624 of the 1000 are reserved, so the first does not fit
    assert _map(memory, model) == {"": "cpu"}
    assert _map(memory, model, fallback_allocation=True) == {"2": 0, "0": "cpu", "1": "cpu"}
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    assert fallback_allocate(parts, sizes, 80) == ("2", model[2], parts[:2])
    inner = {"x": 1144, **{f"x.{name}": size for name, size in sizes.items()}}
    rest = [("x.0", model[0]), ("x.1", model[1])]
    assert fallback_allocate([("x", model)], inner, "0.08KB") == ("x.2", model[2], rest)
    assert fallback_allocate(parts, sizes, 10) == (None, None, parts)


def test_decisions_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _map({0: 400}, verbose=True)
    printed = capsys.readouterr().out
    assert "embed (160 bytes, with []) is placed on 0" in printed
    assert "blocks is split" in printed


def test_buffers_that_fit_nowhere_are_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(100))  # 80, and 800 + buffers of 808 bytes
    with pytest.warns(EchelonWarning, match="have 808 bytes of buffers, which stay on the device"):
        _map({0: 1687, "cpu": 10_000}, model)
    _map({0: 1687, "cpu": 10_000}, model, offload_buffers=True)


def test_weights_that_should_be_tied_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        tie_word_embeddings = True

    class Untied(nn.Linear):
        config = Config()

        def get_output_embeddings(self) -> nn.Module:
            return self

    with caplog.at_level(logging.WARNING):
        _map({"cpu": 1000}, nn.Sequential(nn.Linear(1, 1)))
        assert not caplog.records
        infer_auto_device_map(Untied(2, 2), {"cpu": 1000})
    assert "call model.tie_weights() before" in caplog.text


def test_equal_places_are_combined() -> None:
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 1}) == {"d": 1, "a": 0}
    assert clean_device_map({"a.b.c": 0, "a.b.d": 0, "a.e": 1}, "a") == {"a.e": 1, "a.b": 0}
    assert clean_device_map({"a": 0, "b": 0}) == {"": 0}


def test_a_map_must_cover_every_tensor() -> None:
    check_device_map(Model(), {"": 0})
    check_device_map(Model(), {"embed": 0, "blocks": "cpu", "table": "cpu", "head.weight": 0, "head.bias": 0})
    with pytest.raises(UsageError, match=r"has no device for blocks.1.up.weight, blocks.1.up.bias"):
        check_device_map(Model(), {"embed": 0, "blocks.0": 0, "blocks.1.down": 0, "head": 0, "table": 0})
    with pytest.warns(EchelonWarning, match="match no part of the Model: tail"):
        check_device_map(Model(), {"": 0, "tail": 1})


def test_tied_parameters_on_several_devices_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tied = [["embed.weight", "out.weight"]]
    check_tied_parameters_on_same_device(tied, {"embed": 0, "out": 0})
    assert not caplog.records
    check_tied_parameters_on_same_device(tied, {"embed": 0, "": "cpu"})
    assert "{'embed.weight': 0, 'out.weight': 'cpu'}" in caplog.text
    with pytest.raises(UsageError, match=r"the device map has no device for out.weight"):
        check_tied_parameters_on_same_device(tied, {"embed": 0})


def test_budgets_are_ordered_and_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[int | str, int | str] = {"disk": "1GB", "cpu": "2KiB", 1: 5, 0: "1KB"}
    found = get_max_memory(given)
    assert list(found.items()) == [(0, 1000), (1, 5), ("cpu", 2048), ("disk", 10**9)]
    assert given[0] == 1000  # transformers relies on the conversion in place
    assert "budgets for accelerators [0, 1]" in caplog.text or torch.accelerator.device_count() > 1
    with pytest.raises(UsageError, match="budgets for 'gpu', but these are not devices"):
        get_max_memory({"gpu": 1})


def test_without_budgets_the_memory_within_the_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room:
        left = 12345

    monkeypatch.setattr(device_memory, "room_for_memory", lambda: Room)
    assert get_max_memory()["cpu"] == 12345
    monkeypatch.setattr(device_memory, "room_for_memory", lambda: None)
    assert get_max_memory()["cpu"] > 2**20


def test_balanced_budgets_give_each_device_its_share() -> None:
    model = Model()
    # Leaves: the embedding (160) and five layers of 80; their mean is 112, and 1.25 * 112 = 140.
    assert compute_module_sizes(model)[""] == 600
    leaves = [160, 80, 80, 80, 80, 80]
    extra = int(1.25 * (sum(leaves) // len(leaves)))
    assert get_balanced_memory(model, {0: 1000, 1: 1000, "cpu": 5000}) == {0: 300 + extra, 1: 1000, "cpu": 5000}
    # The block (160) is larger than the mean.
    found = get_balanced_memory(model, {0: 1000, 1: 1000}, no_split_module_classes=["Block"])
    assert found == {0: 300 + 200, 1: 1000}
    # Device 0 gets what the others, one share and a whole device, cannot hold.
    assert get_balanced_memory(model, {0: 1000, 1: 200, 2: 250}, low_zero=True) == {0: 150, 1: 200, 2: 250}
    assert get_balanced_memory(model, {2: 1000, 3: 200, 4: 250}, low_zero=True) == {2: 150, 3: 200, 4: 250}
    assert get_balanced_memory(model, {0: 0, "cpu": 7, "disk": 9}) == {0: 0, "cpu": 7, "disk": 9}


def test_the_largest_layer_and_the_whole_model() -> None:
    model = Model()
    assert calculate_maximum_sizes(model) == (600, (160, ["embed"]))
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_max_layer_size(children, sizes, ["Block"]) == (160, ["embed", "blocks.0", "blocks.1"])
    assert get_max_layer_size([], sizes, []) == (0, [])


def test_a_model_without_values_has_the_same_map() -> None:
    with init_empty_weights():
        model = Model()
    assert _map({0: 400, "cpu": 160}, model) == _map({0: 400, "cpu": 160})
