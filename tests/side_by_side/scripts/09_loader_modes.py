"""Dispatching, seedable shuffling, stateful loaders, iterable data."""

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from show import show
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from range(self.count)


def batches(title, config, loader, epochs=1):
    accelerator = Accelerator(dataloader_config=config)
    prepared = accelerator.prepare(loader)
    for epoch in range(epochs):
        for batch in prepared:
            show(f"{title}:batch", batch)
            show(f"{title}:metrics", sorted(accelerator.gather_for_metrics(batch).tolist()))


data = list(range(21))
batches("dispatch", DataLoaderConfiguration(dispatch_batches=True), DataLoader(data, batch_size=3))
batches(
    "dispatch_split",
    DataLoaderConfiguration(dispatch_batches=True, split_batches=True),
    DataLoader(data[:16], batch_size=4),
)
set_seed(5)
batches("seedable", DataLoaderConfiguration(use_seedable_sampler=True), DataLoader(data, 4, shuffle=True), epochs=2)
batches(
    "data_seed",
    DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11),
    DataLoader(data, 4, shuffle=True),
    epochs=2,
)
batches("non_blocking", DataLoaderConfiguration(non_blocking=True), DataLoader(data, batch_size=4))
batches("iterable", DataLoaderConfiguration(dispatch_batches=False), DataLoader(Numbers(16), batch_size=4))
batches("iterable_dispatched", DataLoaderConfiguration(), DataLoader(Numbers(16), batch_size=4))

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
loader = accelerator.prepare(DataLoader(data, batch_size=2))
iterator = iter(loader)
show("stateful:first", next(iterator))
show("stateful:second", next(iterator))
state = loader.state_dict()
again = accelerator.prepare(DataLoader(data, batch_size=2))
again.load_state_dict(state)
show("stateful:rest", [batch.tolist() for batch in again])
