"""Level 1: a weighted loss, two groups of parameters, a frozen layer, and a rate that follows the evaluation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from echelon.distributed import process_group, reduce, shard
from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, MAX_NORM = 4, 4, 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 12).requires_grad_(False)
        self.norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(12, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.norm(self.embed(x)))))


def make_data(seed, count):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=random)
    y = (x @ torch.randn(8, 4, generator=torch.Generator().manual_seed(1))).argmax(dim=1)
    return TensorDataset(x, y, torch.rand(count, generator=random) * 4 + 0.1)


def main():
    with process_group() as world:
        torch.manual_seed(0)
        net = Net()
        model = DistributedDataParallel(net) if world.world_size > 1 else net
        decayed = [p for p in net.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in net.parameters() if p.ndim == 1 and p.requires_grad]
        groups = [
            {"params": decayed, "weight_decay": 0.1, "initial_lr": 0.01},
            {"params": others, "weight_decay": 0.0, "lr": 0.02, "initial_lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        train_loader = shard(DataLoader(make_data(2, 24), batch_size=BATCH_SIZE, shuffle=True), seed=5)
        test_loader = shard(DataLoader(make_data(3, 13), batch_size=BATCH_SIZE))

        def state():
            return {**net.state_dict(), "lr": optimizer.param_groups[0]["lr"]}

        probe(state)
        first = None
        for _ in range(EPOCHS):
            model.train()
            for x, y, weights in train_loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                total = reduce(weights.sum(), "sum")
                loss = (
                    (losses * weights).sum() / total * world.world_size
                )  # DistributedDataParallel divides by the ranks
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                probe(state)
            model.eval()
            sums = torch.zeros(2)
            with torch.no_grad():
                for x, y, _ in test_loader:
                    sums += torch.stack([F.cross_entropy(net(x), y, reduction="sum"), torch.tensor(float(len(x)))])
            sums = reduce(sums, "sum")
            test_loss = (sums[0] / sums[1]).item()
            first = first or test_loss
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * test_loss / first


if __name__ == "__main__":
    main()
