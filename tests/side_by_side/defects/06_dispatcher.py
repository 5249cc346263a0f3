"""A dispatching loader has a total batch size, and an empty stream has no batches."""

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from show import show
from torch.utils.data import DataLoader, IterableDataset


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
try:
    show("total_batch_size", loader.total_batch_size)
except AttributeError as error:
    show("total_batch_size", f"AttributeError: {error}")
try:
    show("batches of nothing", len(list(accelerator.prepare(DataLoader(Nothing(), batch_size=2)))))
except (TypeError, ValueError) as error:
    show("batches of nothing", type(error).__name__)
