"""Level 2: accumulation, clipping, a schedule, dropout, an evaluation; saves and resumes.

accelerated.py [--save FOLDER --after UPDATES] [--resume FOLDER]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, 4, 2, 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.1)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.second(self.dropout(torch.tanh(self.first(x))))))


def make_data(count=48):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=random)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=random)).argmax(dim=1))


def rate(update):
    return min(1.0, (update + 1) / 3) * 0.95**update


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--resume")
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=False, seed=11)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(100 + accelerator.process_index)  # each rank draws its own dropout masks
    updates, first_epoch, skipped = 0, 0, 0
    if options.resume:
        accelerator.load_state(options.resume)
        updates = options.after
        first_epoch, skipped = divmod(updates * ACCUMULATION, len(loader))

    def state():
        return {**(accelerator.get_state_dict(model) or {}), "lr": schedule.get_last_lr()[0]}

    probe(state)
    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first_epoch and skipped else loader
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates += 1
                probe(state)
                if options.save and updates == options.after:
                    accelerator.save_state(options.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
