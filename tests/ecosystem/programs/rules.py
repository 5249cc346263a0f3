"""The order of a shuffled loader, an incomplete window of accumulation, and random draws after resuming within an epoch.

Each with what a loop without an Accelerator gives.
"""

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    size = 2 * accelerator.num_processes  # of the batches of all processes together

    def shuffled(batch_size: int) -> DataLoader:
        torch.manual_seed(7)
        return DataLoader(TensorDataset(torch.arange(24)), batch_size=batch_size, shuffle=True)

    plain = [[batch.tolist() for (batch,) in epoch] for epoch in [shuffled(size)] * 2]
    loader = accelerator.prepare(shuffled(2))
    prepared = [[accelerator.gather_for_metrics(batch).tolist() for (batch,) in epoch] for epoch in [loader] * 2]

    # Windows of 2, 2 and 1 batches. The gradient of each batch is 1, so each update subtracts the learning rate from the weight.
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ones = DataLoader(TensorDataset(torch.ones(5 * size, 1)), batch_size=2)
    model, optimizer, ones = accelerator.prepare(model, optimizer, ones)
    weights = []
    for (batch,) in ones:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                weights.append(next(model.parameters()).item())

    accelerator.free_memory()
    ordered = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4 * size)), batch_size=2))
    drawn = []
    for number, _ in enumerate(ordered):
        drawn.append(torch.rand(1).item())
        if number == 1:
            state = torch.get_rng_state()
            accelerator.save_state("state")
    accelerator.load_state("state")
    resumed = [torch.rand(1).item() for _ in accelerator.skip_first_batches(ordered, 2)]
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()  # what the iterator of a DataLoader draws as the seed of its workers
    shifted = [torch.rand(1).item() for _ in resumed]
    tiny.show(plain=plain, prepared=prepared, weights=weights, drawn=drawn, resumed=resumed, shifted=shifted)


if __name__ == "__main__":
    main()
