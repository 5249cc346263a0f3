"""DataLoaderConfiguration: which process gets which batch."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from show import show
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler


def batches(title, config, loader):
    accelerator = Accelerator(dataloader_config=config)
    prepared = accelerator.prepare(loader)
    show(f"{title}:is a DataLoader", isinstance(prepared, DataLoader))
    show(f"{title}:len", len(prepared))
    show(f"{title}:total_batch_size", prepared.total_batch_size)
    show(f"{title}:total_dataset_length", prepared.total_dataset_length)
    for epoch in range(2):
        for batch in prepared:
            show(f"{title}:batch", batch)
            show(f"{title}:end", accelerator.gradient_state.end_of_dataloader)
        show(f"{title}:outside", accelerator.gradient_state.end_of_dataloader)


data = list(range(23))
batches("default", None, DataLoader(data, batch_size=4))
batches("uneven", DataLoaderConfiguration(even_batches=False), DataLoader(data, batch_size=4))
batches("drop_last", DataLoaderConfiguration(), DataLoader(data, batch_size=4, drop_last=True))
batches("split", DataLoaderConfiguration(split_batches=True), DataLoader(data, batch_size=4))
batches("split_uneven", DataLoaderConfiguration(split_batches=True, even_batches=False), DataLoader(data, batch_size=4))
batches("sampler", None, DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=False)))
batches("tiny", None, DataLoader(data[:3], batch_size=8))
batches("dicts", None, DataLoader([{"x": torch.tensor(i), "name": f"n{i}"} for i in range(5)], batch_size=2))
