"""Misspelled keyword arguments: a TypeError, as in Python, that suggests the right name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from echelon.accelerator.accelerator import Accelerator as AcceleratorClass
from echelon.trainer import Trainer
from echelon.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (Accelerator, "grad_accumulation_steps", "gradient_accumulation_steps"),
    (Accelerator, "mixed_precission", "mixed_precision"),
    (Trainer, "train_data", "train_dataset"),
    (Trainer, "compute_metric", "compute_metrics"),
    (DataLoaderConfiguration, "split_batch", "split_batches"),
    (ProjectConfiguration, "projectdir", "project_dir"),
    (GradientAccumulationPlugin, "number_steps", "num_steps"),
    (FullyShardedDataParallelPlugin, "cpu_offloading", "cpu_offload"),
    (DeepSpeedPlugin, "zero_stages", "zero_stage"),
    (DistributedDataParallelKwargs, "find_unused_parameter", "find_unused_parameters"),
]


@pytest.mark.parametrize(("cls", "given", "right"), WRONG)
def test_a_misspelled_keyword_suggests_the_right_one(cls: type, given: str, right: str) -> None:
    with pytest.raises(TypeError) as caught:
        cls(**{given: 2})
    assert str(caught.value) == (
        f"{cls.__name__}() got an unexpected keyword argument {given!r}. Did you mean {right!r}?"
    )


def test_a_keyword_like_no_other_is_a_type_error_without_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"Accelerator\(\) got an unexpected keyword argument 'zzz'\. See help\("):
        Accelerator(zzz=1)  # type: ignore[call-arg]


def test_a_subclass_passes_its_own_keywords_through() -> None:
    class Own(Accelerator):
        def __init__(self, *, own: int, **options: Any) -> None:
            super().__init__(**options)
            self.own = own

    assert Own(own=3, cpu=True).own == 3
    with pytest.raises(TypeError, match="Did you mean 'cpu'"):
        Own(own=3, cpus=True)


@pytest.mark.parametrize("cls", [AcceleratorClass, Trainer, DataLoaderConfiguration])
def test_the_signature_is_that_of_the_constructor(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


def test_a_misspelled_option_of_backward_suggests_the_right_one() -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError) as caught:
        accelerator.backward(weight.sum(), num_item=8)
    assert str(caught.value) == ("backward() got an unexpected keyword argument 'num_item'. Did you mean 'num_items'?")
    assert weight.grad is None
    accelerator.backward(weight.sum(), retain_graph=True, create_graph=False, gradient=None, inputs=[weight])
    torch.testing.assert_close(weight.grad, torch.ones(2))


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_module_in_place_of_parameters_is_an_error_that_names_them(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    for model in (torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))):
        with pytest.raises(
            TypeError,
            match=rf"{name}\(\) expects .* got a module \({type(model).__name__}\)\. Pass model\.parameters\(\)",
        ):
            getattr(accelerator, name)(model, 1.0)
