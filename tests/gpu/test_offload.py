"""Models whose weights are on the CPU or on disk, and run on an accelerator with the next weights loaded ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import cpu_offload, disk_offload, dispatch_model
from echelon.hooks import remove_hook_from_submodules

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 12
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def _device() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, 0)


def _peak_bytes(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    module: Any = torch.get_device_module(_device())
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    with torch.no_grad():
        for _ in range(3):
            found = model(x)
    module.synchronize()
    return found, module.max_memory_allocated() - before


@pytest.mark.parametrize("place", ["cpu", "disk", "map"])
def test_results_equal_those_of_the_whole_model_with_a_part_of_its_memory(tmp_path: Path, place: str) -> None:
    device = _device()
    x = torch.randn(64, WIDTH, device=device)
    with torch.no_grad():
        expected = _model().to(device)(x)
    model: nn.Module = _model()
    if place == "cpu":
        cpu_offload(model, device)
    elif place == "disk":
        disk_offload(model, tmp_path, device)
    else:
        places = [0, 0, "cpu", "cpu", "cpu", "disk", "disk", "disk", "disk", "disk", "disk", 0]
        dispatch_model(model, {str(i): at for i, at in enumerate(places)}, offload_dir=tmp_path)
    found, peak = _peak_bytes(model, x)
    assert found.device == device
    # The same kernels run on the same values.
    assert torch.equal(found, expected)
    # The module that runs, the one that is loaded ahead, one that is freed later, and activations.
    assert peak < 5 * LAYER_BYTES
    assert any(layer._hf_hook.prefetcher is not None for layer in model)
    remove_hook_from_submodules(model)


def test_weights_that_change_are_copied_again() -> None:
    device = _device()
    x = torch.randn(4, WIDTH, device=device)
    model = _model()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, device, state_dict=state)
    with torch.no_grad():
        model(x)
        for tensor in state.values():
            tensor.zero_()
        assert model(x).count_nonzero() == 0
    remove_hook_from_submodules(model)


def test_two_passes_on_a_busy_device_see_complete_weights() -> None:
    device = _device()
    x = torch.randn(8, WIDTH, device=device)
    with torch.no_grad():
        expected = _model().to(device)(x)
    model = _model()
    cpu_offload(model, device)
    busy = torch.randn(4096, 4096, device=device)
    with torch.no_grad():
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)  # keeps the main stream behind the copies
            assert torch.equal(model(x), expected)
    remove_hook_from_submodules(model)
