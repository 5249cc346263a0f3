"""Learning rates at each step."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from show import show
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR
from torch.utils.data import DataLoader


def trace(title, make, epochs=1, per_epoch=False, **options):
    accelerator = Accelerator(**options)
    loader = DataLoader(list(range(24)), batch_size=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer, len(loader) * epochs)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float().unsqueeze(1)).mean())
                optimizer.step()
                if not per_epoch:
                    scheduler.step()
                optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
        if per_epoch:
            scheduler.step()
    show(title, rates)
    show(f"{title}:state", scheduler.state_dict()["last_epoch"])


trace("one_cycle", lambda optimizer, steps: OneCycleLR(optimizer, max_lr=1.0, total_steps=steps), epochs=2)
trace("linear", lambda optimizer, steps: LinearLR(optimizer, start_factor=0.1, total_iters=steps))
trace("cosine_per_epoch", lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=3), epochs=3, per_epoch=True)
trace("warmup", lambda optimizer, steps: LambdaLR(optimizer, lambda step: min(1.0, step / 6)))
trace(
    "accumulated", lambda optimizer, steps: LinearLR(optimizer, 0.1, total_iters=steps), gradient_accumulation_steps=3
)
trace(
    "one_cycle_accumulated",
    lambda optimizer, steps: OneCycleLR(optimizer, max_lr=1.0, total_steps=steps // 3),
    gradient_accumulation_steps=3,
)
trace(
    "split_batches",
    lambda optimizer, steps: LinearLR(optimizer, 0.1, total_iters=steps),
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
trace("by_hand", lambda optimizer, steps: LinearLR(optimizer, 0.1, total_iters=6), step_scheduler_with_optimizer=False)
