"""Level 2: MNIST with the Accelerator, in the loop for one device plus a few lines for several ranks.

Run it as one process, as two processes on this machine, or as two with torch's own launcher:

    python examples/mnist_accelerator.py
    echelon launch --cpu --num_processes 2 examples/mnist_accelerator.py
    torchrun --nproc-per-node 2 examples/mnist_accelerator.py
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from mnist_data import mnist, parse_args
from mnist_net import Net
from torch.utils.data import DataLoader
from tqdm import tqdm

from echelon import Accelerator, set_seed


def main() -> None:
    args = parse_args()

    accelerator = Accelerator()
    print(f"world: {accelerator.world}", flush=True)

    set_seed(0)  # the same initial weights on every rank
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set, test_set = mnist(True, args.data, args.limit), mnist(False, args.data, args.limit)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    set_seed(0, device_specific=True)  # different dropout masks on each rank

    for epoch in range(args.epochs):
        model.train()
        quiet = not (accelerator.is_main_process and sys.stderr.isatty())
        bar = tqdm(train_loader, desc=f"epoch {epoch + 1}", disable=quiet)
        for step, (images, labels) in enumerate(bar, start=1):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            if step % 50 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                right = model(images).argmax(dim=1) == labels
                correct += accelerator.gather_for_metrics(right).sum().item()  # each image exactly once
        accuracy = 100 * correct / len(test_set)
        accelerator.log({"test_accuracy": accuracy}, step=(epoch + 1) * len(train_loader))

    weights = b"".join(value.cpu().numpy().tobytes() for value in accelerator.get_state_dict(model).values())
    print(
        f"rank {accelerator.process_index}: {step} steps, weights {hashlib.sha256(weights).hexdigest()[:12]}",
        flush=True,
    )
    if args.save:
        accelerator.save(accelerator.get_state_dict(model), args.save)
    accelerator.print(f"test accuracy {accuracy:.2f} %")
    accelerator.end_training()
    if accuracy < 98.0 and args.limit is None:
        sys.exit("the accuracy is below 98.0 %: training failed")


if __name__ == "__main__":
    main()
