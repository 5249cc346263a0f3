"""A language model on rows of tokens, with accumulation that goes on over the end of an epoch, and clipping."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from show import show
from torch.utils.data import DataLoader

set_seed(26)
plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
accelerator = Accelerator(gradient_accumulation_plugin=plugin)
rows = torch.randint(1, 20, (160, 9))
model = torch.nn.Sequential(
    torch.nn.Embedding(20, 12), torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 20)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4, drop_last=True))

for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                show("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        show("loss", loss)
        show("sync", accelerator.sync_gradients)
