"""fp16 and its loss scaler."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, set_seed
from show import show

handler = GradScalerKwargs(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, enabled=True)
show("options", handler.to_kwargs())

set_seed(0)
try:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
    show("fp16 on the CPU", "offered")
except ValueError as error:
    show("fp16 on the CPU", "refused")
    show("reason", str(error))
    accelerator = Accelerator(kwargs_handlers=[handler])

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
x = torch.ones(2, 4)
for step in range(3):
    loss = model(x).mean()
    if step == 1:
        loss = loss * float("inf")
    accelerator.backward(loss)
    if step == 1 and accelerator.mixed_precision == "no":
        optimizer.zero_grad()  # nothing else skips this update
    optimizer.step()
    scheduler.step()
    show("skipped", [accelerator.optimizer_step_was_skipped, optimizer.step_was_skipped])
    show("lr", scheduler.get_last_lr())
    optimizer.zero_grad()
show("finite", all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()))
