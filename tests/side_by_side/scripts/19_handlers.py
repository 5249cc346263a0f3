"""Options of DDP and the process group; find_executable_batch_size."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import find_executable_batch_size, set_seed
from show import show

group = InitProcessGroupKwargs(backend="gloo", init_method="env://", timeout=timedelta(seconds=120))
show("group options", {name: str(value) for name, value in group.to_kwargs().items()})
ddp = DistributedDataParallelKwargs(
    dim=0,
    broadcast_buffers=False,
    bucket_cap_mb=10,
    find_unused_parameters=True,
    check_reduction=False,
    gradient_as_bucket_view=True,
    static_graph=False,
    comm_hook="no",
    comm_wrapper="no",
    comm_state_option={},
)
show("ddp options", ddp.to_kwargs())
# A process without a launcher has no group, and accelerate fails if options for the group are given.
accelerator = Accelerator(kwargs_handlers=[ddp, group] if "RANK" in os.environ else [ddp])


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


set_seed(0)
model = accelerator.prepare(Branches())
for step in range(2):
    accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
own = accelerator.unwrap_model(model)
show("gradient", own.used.weight.grad)
show("unused", own.unused.weight.grad is None)


def fits(batch_size, tried):
    tried.append(batch_size)
    if batch_size > 100:
        raise RuntimeError("CUDA out of memory. Tried to allocate more")
    return batch_size


tried = []
show("batch size", find_executable_batch_size(fits)(tried))
show("tried", tried)
tried = []
sizes = iter([64, 32])
halved = find_executable_batch_size(fits, starting_batch_size=128, reduce_batch_size_fn=lambda: next(sizes))
show("halved", halved(tried))
show("tried halves", tried)
