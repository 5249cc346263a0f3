"""``parity`` and ``max_micro_batch_size`` from the launcher, the environment and the code; errors name the place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import encode, from_flags


def _by_launcher(**values: str) -> dict[str, str]:
    flags = {name: (value, f"--{name}") for name, value in values.items()}
    return {"ECHELON_CONFIG": encode(resolve(RunConfig, [from_flags(flags)]))}


def _by_environment(**values: str) -> dict[str, str]:
    return {f"ECHELON_{name.upper()}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("given", "origin"), [(_by_launcher, "flag --parity"), (_by_environment, "env ECHELON_PARITY")]
)
def test_settings_outside_the_script_are_used(given: Any, origin: str) -> None:
    with environ.patch(given(parity="exact", max_micro_batch_size="4")):
        accelerator = Accelerator(cpu=True)
    assert accelerator.parity == "exact"
    assert str(accelerator.config.origins["parity"]) == origin
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=10))
    assert [len(batch) for (batch,) in loader] == [4, 3, 3]


def test_the_script_overrides_the_launcher() -> None:
    with environ.patch(_by_launcher(parity="exact")):
        accelerator = Accelerator(cpu=True, parity="off")
    assert accelerator.parity == "off"
    assert str(accelerator.config.origins["parity"]) == "code Accelerator(parity=)"


@pytest.mark.parametrize(
    ("given", "origin"),
    [(_by_launcher, "flag --max_micro_batch_size"), (_by_environment, "env ECHELON_MAX_MICRO_BATCH_SIZE")],
)
def test_the_error_for_a_micro_batch_size_without_exact_parity_names_its_origin(given: Any, origin: str) -> None:
    with environ.patch(given(max_micro_batch_size="4")), pytest.raises(ConfigError, match=f"=4 .from {origin}"):
        Accelerator(cpu=True)
