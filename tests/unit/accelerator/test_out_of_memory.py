"""The report of an allocation that failed: what is in it, and which switch it names."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import EMA, Accelerator
from echelon.accelerator.out_of_memory import MemoryReport, explain_out_of_memory
from echelon.trainer import Trainer
from tests.trainer_models import Net, arguments, net_data

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12288 bytes."


class _Full(nn.Module):
    """Fails in its forward pass, with tensors of given sizes alive."""

    def __init__(self, text: str, sizes: list[int], checkpointed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1000, 1000)
        self.text, self.sizes = text, sizes
        self.is_gradient_checkpointing = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = [torch.zeros(size) for size in self.sizes]
        raise RuntimeError(f"{self.text}{len(hidden) * 0 or ''}")


def _explain(model: nn.Module, **options: Any) -> MemoryReport | None:
    gc.collect()  # tensors of other tests
    accelerator = Accelerator(cpu=True, **options)
    prepared, _optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    try:
        prepared(torch.zeros(2, 1000))
    except RuntimeError as raised:
        return explain_out_of_memory(raised)
    raise AssertionError


@pytest.mark.parametrize(
    ("text", "sizes", "checkpointed", "advice"),
    [
        (CPU, [2**20] * 8, False, "activation checkpointing: "),  # many tensors of 4 MiB
        (CPU, [2**20] * 8, True, "a micro-batch of half the size"),
        (CPU, [2**24], False, "a micro-batch of half the size"),  # one of 64 MiB, as logits are
        (CUDA, [], False, "a micro-batch of half the size"),
    ],
)
def test_the_switch_follows_from_what_fills_the_memory(
    text: str, sizes: list[int], checkpointed: bool, advice: str
) -> None:
    report = _explain(_Full(text, sizes, checkpointed))
    assert report is not None
    assert report.advice.startswith(advice)


def test_activation_checkpointing_that_is_on_is_not_recommended() -> None:
    options = {"activation_checkpointing": "full", "activation_checkpointing_blocks": "Linear"}
    report = _explain(_Full(CPU, [2**20] * 8), **options)
    assert report is not None
    assert report.advice.startswith("a micro-batch of half the size")


def test_tensors_are_named_by_weight_or_by_variable_and_line() -> None:
    report = _explain(_Full(CPU, [2**22, 2**21]))
    lines = str(report).splitlines()
    line = _Full.forward.__code__.co_firstlineno + 2
    assert lines[0] == f"out of memory: 12.0 KiB more were wanted in {__file__}:{line}"
    assert lines[1] == "  the largest tensors of this rank:"
    for text in (
        f"      16.0 MiB  hidden[0] in forward ({__file__}:{line})  [4194304] float32 cpu",
        f"       8.0 MiB  hidden[1] in forward ({__file__}:{line})  [2097152] float32 cpu",
        "       3.8 MiB  weight layer.weight  [1000, 1000] float32 cpu",
    ):
        assert text in lines
    assert lines[-2].startswith("  weights ")


def test_averages_of_the_weights_are_no_activations() -> None:
    accelerator, model = Accelerator(cpu=True), _Full(CPU, [])
    model, optimizer, _average = accelerator.prepare(model, torch.optim.SGD(model.parameters()), EMA())
    accelerator.backward(model.layer(torch.ones(1, 1000)).sum())
    optimizer.step()
    with pytest.raises(RuntimeError) as raised:
        model(torch.zeros(2, 1000))
    assert "       3.8 MiB  average of layer.weight  [1000, 1000] float32 cpu" in str(
        explain_out_of_memory(raised.value)
    )


def test_other_errors_have_no_report() -> None:
    assert _explain(_Full("shape mismatch", [])) is None


def test_a_trainer_without_a_launcher_logs_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullNet(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            raise torch.OutOfMemoryError(CUDA)

    trainer = Trainer(FullNet(), arguments(str(tmp_path)), train_dataset=net_data(8))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    assert "out of memory: 2.0 GiB more were wanted in" in caplog.text
    assert "what would have saved most: a micro-batch of half the size" in caplog.text
