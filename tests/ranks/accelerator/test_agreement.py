"""Startup checks of the ranks, their messages and the progress counters; settings that differ between ranks are reported."""

from __future__ import annotations

import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import ConfigError, DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.config.derive import check, derive
from echelon.config.files import from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import encode, from_flags
from echelon.launch.environment import rank_variables
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import all_warnings, heard


def _said(action: Any) -> list[str]:
    with all_warnings() as caught:
        action()
    return [str(w.message) for w in caught if issubclass(w.category, EchelonWarning)]


def _numbers(n: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(n).double()[:, None]), batch_size=batch_size, **options)


# ---- the model -------------------------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


def _other_weights(where: str) -> tuple[list[str], list[float]]:
    torch.manual_seed(3)
    model = _Scaled()
    if dist.get_rank() == 2:
        with torch.no_grad():
            if where == "weight":
                model.inner.weight[1, 2] += 1e-7  # one bit or two
            elif where == "buffer":
                model.scale.fill_(2.0)
    accelerator = Accelerator(parity="exact")
    said = _said(lambda: accelerator.prepare(model))
    return said, [float(value) for value in accelerator.unwrap_model(model).state_dict()["inner.weight"].flatten()]


@pytest.mark.parametrize(("where", "name"), [("weight", "inner.weight"), ("buffer", "scale"), ("nowhere", None)])
def test_a_rank_with_different_initial_weights_is_named(where: str, name: str | None) -> None:
    results = run_on_ranks(_other_weights, where, world_size=3)
    torch.manual_seed(3)
    expected = _Scaled().inner.weight.flatten().tolist()
    assert [weights for _, weights in results] == [expected] * 3
    (said, _), *others = results
    assert [s for s, _ in others] == [[], []]  # rank zero warns
    if name is None:
        assert said == []
    else:
        assert len(said) == 1
        assert f"rank 2 differs in {name}." in said[0]


def _other_model() -> None:
    Accelerator(parity="exact").prepare(nn.Linear(3, 2 if dist.get_rank() == 0 else 4))


def test_a_rank_with_another_model_is_an_error_on_all_ranks() -> None:
    for text in errors_on_ranks(DesyncError, _other_model, world_size=2, num_errors=2):
        assert "rank 1 prepares a different model than rank zero" in text
        assert "'weight torch.float32 [4, 3]'" in text
        assert "'weight torch.float32 [2, 3]'" in text


# ---- the data --------------------------------------------------------------------------------------------------------


def _other_data(parity: str, sizes: dict[int, tuple[int, int]]) -> None:
    n, batch_size = sizes.get(dist.get_rank(), (10, 4))
    Accelerator(parity=parity).prepare(_numbers(n, batch_size, shuffle=True))


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_ranks_with_different_data_are_named_with_its_length(parity: str) -> None:
    for text in errors_on_ranks(DesyncError, _other_data, parity, {1: (9, 4)}, world_size=3, num_errors=3):
        assert "the dataset has rank 0: 10, rank 1: 9, rank 2: 10" in text
    for text in errors_on_ranks(DesyncError, _other_data, parity, {2: (10, 2)}, world_size=3, num_errors=3):
        assert "the batch size is rank 0: 4, rank 1: 4, rank 2: 2" in text


def _what_the_batch_means(batch_size: int, accumulation: int, max_micro: int | None) -> list[str]:
    with heard("echelon", level=logging.INFO) as records:
        accelerator = Accelerator(
            parity="exact", gradient_accumulation_steps=accumulation, max_micro_batch_size=max_micro
        )
        accelerator.prepare(_numbers(50, batch_size), _numbers(50, batch_size))
    return [found for text in records for found in re.findall("global batch.*", text)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((32, 1, None), "global batch 32 = 2 processes x 16 samples"),
        ((32, 4, None), "global batch 32 = 2 processes x 4 micro-steps x 4 samples"),
        ((10, 1, 2), "global batch 10 = 2 processes x 3 micro-steps x 1 to 2 samples"),
    ],
)
def test_the_meaning_of_the_batch_size_is_logged_once(settings: tuple[int, int, int | None], expected: str) -> None:
    assert run_on_ranks(_what_the_batch_means, *settings, world_size=2) == [[expected], []]


# ---- sums of one rank divided by the total length -------------------------------------------------------------------------------


def _evaluate(parity: str, share: str, asked: str) -> list[str]:
    accelerator = Accelerator(parity=parity)
    train, test = accelerator.prepare(_numbers(8, 4), _numbers(10, 4))

    def passes() -> None:
        size = len(test.dataset) if asked == "before" else 0
        total = torch.zeros(())
        with torch.no_grad():
            for (x,) in test:
                total += accelerator.gather_for_metrics(x).sum() if share == "gather_for_metrics" else x.sum()
        size = len(test.dataset) if asked == "after" else size
        if share == "reduce":
            accelerator.wait_for_everyone()  # combines nothing, nor does it end the evaluation
            total = accelerator.reduce(total)
        elif share == "torch":
            dist.all_reduce(total)
        if size:
            total /= size
        for _ in train:  # the next epoch
            pass
        len(train.dataset)
        accelerator.wait_for_everyone()

    return _said(passes)


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_dividing_a_ranks_sum_by_the_total_length_is_reported(parity: str) -> None:
    for asked in ("before", "after"):
        mine, others = run_on_ranks(_evaluate, parity, "nothing", asked, world_size=2)
        assert others == []
        assert len(mine) == 1
        assert "nothing was gathered or reduced" in mine[0]
    for share, asked in (("reduce", "before"), ("torch", "after"), ("gather_for_metrics", "after"), ("nothing", "")):
        assert run_on_ranks(_evaluate, parity, share, asked, world_size=2) == [[], []]


# ---- the seed --------------------------------------------------------------------------------------------------------


def _order_of_a_late_seed(parity: str) -> list[list[float]]:
    """Return the samples of this rank in two programs that call ``manual_seed`` between Accelerator() and prepare()."""
    read = []
    for program in range(2):
        torch.manual_seed(100 + 10 * program + dist.get_rank())  # independent of the earlier state of the process
        accelerator = Accelerator(parity=parity)
        torch.manual_seed(5 if dist.get_rank() == 0 else 6)
        loader = accelerator.prepare(_numbers(16, 8, shuffle=True))
        read.append([float(x) for (batch,) in loader for x in batch.flatten()])
    return read


@pytest.mark.parametrize("parity", ["exact", "bitwise"])
def test_the_order_comes_from_rank_zeros_seed_at_prepare(parity: str) -> None:
    first, second = run_on_ranks(_order_of_a_late_seed, parity, world_size=2)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert sorted(first[0] + second[0]) == [float(i) for i in range(16)]


# ---- progress --------------------------------------------------------------------------------------------------------


def _count(folder: Path, stop_at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=2, seed=1)
    model: Any = nn.Linear(1, 1).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _numbers(10, 4))
    if folder.exists():
        accelerator.load_state(folder)
    loaded = accelerator.progress.to_json()
    for step, (x,) in enumerate(loader, 1):
        accelerator.backward(model(x).square().mean(), num_items=3 * len(x))  # "tokens"
        optimizer.step()
        optimizer.zero_grad()
        if step == stop_at:
            break
    accelerator.save_state(folder)
    return loaded, accelerator.progress.to_json()


def test_progress_is_counted_and_saved_completely(tmp_path: Path) -> None:
    zero = {"epoch": 0, "step": 0, "micro_step": 0, "samples_seen": 0, "tokens_seen": 0.0, "position": 0}
    folder = tmp_path / "state"
    # Updates of 4, 4 and 2 samples in two micro-steps each; stopped in the middle of the second one.
    done = {**zero, "step": 1, "samples_seen": 4, "tokens_seen": 12.0, "position": 4}
    for loaded, now in run_on_ranks(_count, folder, 3, world_size=2):
        assert loaded == zero
        assert now == {**done, "micro_step": 1}
    for loaded, now in run_on_ranks(_count, folder, 99, world_size=1):
        assert loaded == done
        assert now == {**zero, "step": 3, "samples_seen": 10, "tokens_seen": 30.0, "position": 10, "micro_step": 2}


def _leave_in_the_middle() -> torch.Tensor:
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=2)
    model: Any = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _numbers(4, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EchelonWarning)
        for stop in (True, False):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if stop:
                    break
    assert ["ended in the middle of an update" in str(one.message) for one in said] == [
        True
    ] * accelerator.is_main_process
    weight: torch.Tensor = accelerator.unwrap_model(model).weight.detach().clone()
    return weight


def test_an_unfinished_update_leaves_no_gradients() -> None:
    # mean(w^2 x^2) over 0, 1, 2, 3 has the gradient 2 w * 3.5: one step from w = 1, not one and a half.
    for weight in run_on_ranks(_leave_in_the_middle, world_size=2):
        torch.testing.assert_close(weight, torch.tensor([[1 - 0.1 * 7.0]], dtype=torch.float64), rtol=1e-12, atol=0)


def _look_meanwhile(accumulation: int, way: str) -> tuple[torch.Tensor, int]:
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=accumulation)
    model: Any = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, other = accelerator.prepare(model, optimizer, _numbers(4, 4), _numbers(6, 6))

    def look() -> None:
        if way == "peek":
            next(iter(other))

    for batches in zip(loader, other) if way == "zip" else ((batch,) for batch in loader):
        look()
        with accelerator.accumulate(model):
            accelerator.backward(model(batches[0][0]).square().mean(), num_items=len(batches[0][0]))
            look()
            optimizer.step()
            optimizer.zero_grad()
    weight: torch.Tensor = accelerator.unwrap_model(model).weight.detach().clone()
    return weight, accelerator.progress.samples_seen


@pytest.mark.parametrize("way", ["peek", "zip"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_read_beside_the_loop_changes_nothing(accumulation: int, way: str) -> None:
    for weight, seen in run_on_ranks(_look_meanwhile, accumulation, way, world_size=2):
        torch.testing.assert_close(weight, torch.tensor([[1 - 0.1 * 7.0]], dtype=torch.float64), rtol=1e-12, atol=0)
        assert way == "peek" or seen == 4


CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def _told_differently(handed: str, variables: dict[str, str]) -> str:
    mine = {"ECHELON_CONFIG": handed, **(variables if dist.get_rank() == 1 else {})}
    with environ.patch(mine):
        try:
            Accelerator(cpu=True)
        except ConfigError as error:
            return str(error)
    return "made"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "fp16"},
            "mixed_precision is 'bf16' on rank 0 (from file {}:1) and 'fp16' on rank 1",
        ),
        (
            {"FSDP_VERSION": "2"},
            "fsdp_version is None on rank 0 (from default) and 2 on rank 1 (from env FSDP_VERSION)",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "BF16", "ECHELON_DEBUG": "false", "ECHELON_GPU_IDS": "3"}, None),
    ],
)
def test_a_rank_with_another_setting_is_named_with_both_values(
    variables: dict[str, str], told: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mixed_precision: bf16\n")
    handed = encode(resolve(RunConfig, [from_file(path)]))
    for rank, text in enumerate(run_on_ranks(_told_differently, handed, variables, world_size=2)):
        assert text == "made" if told is None else told.format(path) in text
        assert told is None or f"rank {rank}" in text.splitlines()[1]  # every rank says it
        assert told is None or "do:" in text


def _engines(handed: str) -> list[str]:
    names = []
    for variables, given in (
        ({"ECHELON_CONFIG": handed}, None),
        ({"ECHELON_CONFIG": handed, "ECHELON_ENGINE": "ddp"}, None),
        ({"ECHELON_CONFIG": handed, "ECHELON_ENGINE": "ddp"}, "fsdp2"),
    ):
        with environ.patch(variables):
            names.append(Accelerator(cpu=True, engine=given).capabilities.name)
    return names


def test_the_engine_in_the_code_overrides_the_environment_and_the_file() -> None:
    handed = json.dumps({"engine": ["zero1", 2, "run.yaml:1"]})
    assert run_on_ranks(_engines, handed, world_size=2) == [["zero1", "ddp", "fsdp2"]] * 2


def _engine_of_the_run(variables: dict[str, str]) -> tuple[str, int | None, str]:
    with environ.patch(variables):
        accelerator = Accelerator()
    return (
        accelerator.capabilities.name,
        getattr(accelerator.fsdp_plugin, "fsdp_version", None),
        str(accelerator.config.origins["mixed_precision"]),
    )


@pytest.mark.parametrize(
    ("name", "flags", "engine", "version"),
    [
        ("fsdp1.yaml", {}, "fsdp2", 1),
        ("fsdp2.yaml", {}, "fsdp2", 2),
        ("zero3_offload.yaml", {"engine": "fsdp2"}, "fsdp2", 2),
        ("multi_gpu.yaml", {"engine": "fsdp2"}, "fsdp2", 2),
        ("multi_gpu.yaml", {"engine": "zero1"}, "zero1", None),
    ],
)
def test_file_and_flags_select_the_engine_of_a_script_without_arguments(
    name: str, flags: dict[str, str], engine: str, version: int | None
) -> None:
    given = {**flags, "num_processes": "2", "cpu": "true"}
    layers = [from_flags({field: (value, f"--{field}") for field, value in given.items()}), from_file(CONFIGS / name)]
    resolved = derive(resolve(RunConfig, layers))
    check(resolved)
    variables = rank_variables(resolved, num_processes=2, num_threads=1, has_accelerator=False)
    line = (CONFIGS / name).read_text().splitlines().index("mixed_precision: bf16") + 1
    expected = (engine, version, f"file {CONFIGS / name}:{line}")
    assert run_on_ranks(_engine_of_the_run, variables, world_size=2) == [expected] * 2
