"""A checkpoint in the middle of an epoch, from which a second training continues: skip_first_batches, a registered counter."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset


class Counter:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def build(seed):
    set_seed(seed)
    accelerator = Accelerator()
    random = torch.Generator().manual_seed(25)
    x = torch.randn(64, 3, generator=random)
    data = TensorDataset(x, x.prod(dim=1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.SiLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=64, power=2.0)
    prepared = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2), scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, counter, *prepared


def train(accelerator, counter, model, optimizer, loader, scheduler, last):
    """Train from the step that the counter has up to ``last``."""
    losses = []
    while counter.step < last:
        done = counter.step % len(loader)  # batches of this epoch
        for inputs, targets in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.step += 1
            losses.append(accelerator.gather(loss).mean().item())
            if counter.step == last:
                break
    show("losses", losses)
    show("rate", scheduler.get_last_lr())


run = build(seed=1)
train(*run, last=3)
run[0].save_state("state")
train(*run, last=6)
first = [value.detach().clone() for value in run[2].parameters()]

run = build(seed=2)  # other initial weights, which are replaced
run[0].load_state("state")
show("step", run[1].step)
train(*run, last=6)
show("the same weights", all(torch.equal(one, other) for one, other in zip(first, run[2].parameters())))
