"""GradientAccumulationPlugin at the end of a loader whose length is not a multiple of the window."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset


def train(title, plugin):
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    x = torch.randn(20, 2)
    y = x[:, :1] * 2
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    syncs = []
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            syncs.append(accelerator.sync_gradients)
        show(f"{title}:lr", scheduler.get_last_lr())
    show(f"{title}:syncs", syncs)
    show(f"{title}:weight", accelerator.unwrap_model(model).weight)
    show(f"{title}:count", scheduler.state_dict()["_step_count"])


train("whole_windows", GradientAccumulationPlugin(num_steps=5))
train("across_epochs", GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False))
train("every_batch", GradientAccumulationPlugin(num_steps=5, sync_each_batch=True))
train("scheduler_alone", GradientAccumulationPlugin(num_steps=5, adjust_scheduler=False))
train("partial_window", GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=True, adjust_scheduler=True))
