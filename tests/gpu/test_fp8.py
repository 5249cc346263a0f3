"""fp8 by the kernels of the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.device import choose_device, has_fp8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
def test_it_learns_in_fp8_on_the_device(compiled: bool) -> None:
    device = choose_device(local_rank=0, local_world_size=1)
    if not has_fp8(device):
        pytest.skip(f"no matrix products in fp8 on {device}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    names = list(model.state_dict())
    accelerator = Accelerator(mixed_precision="fp8", dynamo_backend="inductor" if compiled else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert not accelerator.ao_recipe_handler.config.emulate  # type: ignore[union-attr]
    x, y = torch.randn(2, 128, 64, device=accelerator.device).unbind()
    losses = []
    for _ in range(50):
        loss = nn.functional.mse_loss(prepared(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1].item() < 0.7 * losses[0].item()
    assert list(accelerator.get_state_dict(prepared)) == names
    assert type(model[2]).__name__ == "Float8Linear"
    with torch.no_grad():
        hidden = nn.functional.gelu(model[0](x)).bfloat16()
        exact = nn.functional.linear(hidden.float(), model[2].weight, model[2].bias)
        with torch.autocast(accelerator.device.type, dtype=torch.bfloat16):
            difference = (model[2](hidden).float() - exact).abs().max() / exact.abs().max()
    assert 0.004 < difference.item() < 0.1  # of bf16 it would be some 2 ** -9
