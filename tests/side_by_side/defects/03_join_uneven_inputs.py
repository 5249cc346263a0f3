"""`join_uneven_inputs` makes a process without further batches wait for the others, also on the CPU."""

from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DataLoaderConfiguration
from show import show
from torch.utils.data import DataLoader

accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(even_batches=False),
    kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=10))],
)
model = torch.nn.Linear(1, 1)
model, loader = accelerator.prepare(model, DataLoader(torch.arange(5.0).reshape(5, 1), batch_size=1))
steps = 0
try:
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            steps += 1
except RuntimeError:
    show("ended", "in an error of the process group")
else:
    show("ended", "well")
show("steps", steps)
