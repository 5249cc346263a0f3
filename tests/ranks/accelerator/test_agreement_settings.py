"""Ranks with different settings report them at startup; the engine is a setting, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.config.derive import check, derive
from echelon.config.files import from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import encode, from_flags
from echelon.launch.environment import rank_variables
from tests.harness import run_on_ranks

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
