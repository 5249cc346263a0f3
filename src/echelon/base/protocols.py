"""Protocols for objects from other libraries."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class KnowsItsEnd(Protocol):
    """A loader that reads one batch ahead, such as those that ``prepare`` returns."""

    end_of_dataloader: bool
    """Whether the current batch is the last one."""


@runtime_checkable
class HasDeviceMap(Protocol):
    """A model placed on several devices, for example by transformers' ``device_map``."""

    hf_device_map: Any


@runtime_checkable
class SupportsSetEpoch(Protocol):
    """A sampler or dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next pass."""


@runtime_checkable
class SupportsStateDict(Protocol):
    """An object that can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


@runtime_checkable
class SupportsTo(Protocol):
    """An object that can be moved to a device, such as a tokenizer's batch."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the object on the device."""


@runtime_checkable
class SupportsSelect(Protocol):
    """A dataset that can return the subset at given indices, such as a Hugging Face dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def select(self, indices: Any) -> Any:
        """Return the samples at ``indices``."""


@runtime_checkable
class SupportsShard(Protocol):
    """An iterable dataset whose shards can be assigned to ranks, such as a Hugging Face dataset."""

    @property
    def n_shards(self) -> int:
        """The number of shards."""

    def shard(self, num_shards: int, index: int) -> Any:
        """Return every ``num_shards``-th shard, starting with shard ``index``."""


@runtime_checkable
class SupportsWithFormat(Protocol):
    """A map-style dataset that can return its rows in different formats, such as a Hugging Face dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, key: Any) -> Any:
        """Return a sample or a slice of samples."""

    def with_format(self, type: str) -> Any:
        """Return the same data in the format ``type``, such as ``arrow``."""
