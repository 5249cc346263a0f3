"""accelerate divides the last, shorter window of an epoch by the full number of micro-steps (tests/side_by_side/defects/11_last_window.py)."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
