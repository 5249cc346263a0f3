"""Level 1: MNIST with your own DistributedDataParallel loop and echelon.distributed.

Run it as one process, as two processes on this machine, or as two with torch's own launcher:

    python examples/mnist_ddp.py
    echelon launch --cpu --num_processes 2 examples/mnist_ddp.py
    torchrun --nproc-per-node 2 examples/mnist_ddp.py
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from mnist_data import mnist, parse_args
from mnist_net import Net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from echelon import set_seed
from echelon.distributed import process_group, reduce, shard


def main() -> None:
    args = parse_args()

    with process_group() as world:  # calls setup() here and cleanup() at the end, even after an exception
        print(f"world: {world}", flush=True)

        set_seed(0)  # the same initial weights on every rank
        model = DistributedDataParallel(Net().to(world.device))
        set_seed(0, device_specific=True)  # different dropout masks on each rank
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        # Each rank gets its own batches, in an order that changes with each epoch.
        train_set, test_set = mnist(True, args.data, args.limit), mnist(False, args.data, args.limit)
        train_loader = shard(DataLoader(train_set, batch_size=args.batch_size, shuffle=True))
        test_loader = shard(DataLoader(test_set, batch_size=1000))

        for epoch in range(args.epochs):
            model.train()
            quiet = not (world.is_rank_zero and sys.stderr.isatty())
            bar = tqdm(train_loader, desc=f"epoch {epoch + 1}", disable=quiet)
            for step, (images, labels) in enumerate(bar, start=1):
                optimizer.zero_grad()
                loss = F.nll_loss(model(images.to(world.device)), labels.to(world.device))
                loss.backward()  # DistributedDataParallel averages the gradients over the ranks here
                optimizer.step()
                if step % 50 == 0:
                    bar.set_postfix(loss=f"{loss.item():.3f}")

            model.eval()
            correct = torch.zeros((), dtype=torch.int64, device=world.device)
            with torch.no_grad():
                for images, labels in test_loader:
                    prediction = model(images.to(world.device)).argmax(dim=1)
                    correct += (prediction == labels.to(world.device)).sum()
            # The sum over the ranks, divided by the number of samples, is exact on any number of ranks.
            accuracy = 100 * reduce(correct, "sum").item() / len(test_set)

        weights = b"".join(value.cpu().numpy().tobytes() for value in model.module.state_dict().values())
        print(f"rank {world.rank}: {step} steps, weights {hashlib.sha256(weights).hexdigest()[:12]}", flush=True)
        if world.is_rank_zero:
            if args.save:
                torch.save(model.module.state_dict(), args.save)
            print(f"test accuracy {accuracy:.2f} %")
            print("next: examples/mnist_accelerator.py, the same training run with Level 2")
        if accuracy < 98.0 and args.limit is None:
            sys.exit("the accuracy is below 98.0 %: training failed")


if __name__ == "__main__":
    main()
