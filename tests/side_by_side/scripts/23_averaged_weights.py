"""An exponential average of the weights, kept by hand, and early stopping that all processes agree on."""

import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset


class Average:
    """Averages of the parameters, updated after each step."""

    def __init__(self, parameters, decay):
        self.decay = decay
        self.values = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for value, parameter in zip(self.values, parameters):
            value.mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)


set_seed(23)
accelerator = Accelerator()
x = torch.randn(96, 4)
y = torch.sin(x.sum(dim=1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
first = copy.deepcopy(model).requires_grad_(False)  # a frozen copy, as a teacher
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
average = Average(list(model.parameters()), decay=0.9)

stopped = None
for epoch in range(3):
    losses = []
    for inputs, targets in loader:
        outputs = model(inputs)
        with torch.no_grad():
            soft = first(inputs)
        loss = 0.9 * torch.nn.functional.huber_loss(outputs, targets) + 0.1 * torch.nn.functional.mse_loss(
            outputs, soft
        )
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.detach())
    mean = accelerator.gather(torch.stack(losses)).mean()
    show("mean loss", mean)
    if accelerator.is_main_process and mean < 0.2:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        stopped = epoch
        break
show("stopped", stopped)
for value in average.values:
    show("average", value)
