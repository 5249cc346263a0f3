"""MNIST from the files of the examples."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
FILES = HERE / "examples" / "data" / "mnist"


class MNIST:
    """A dataset of pairs (image, label); ``root`` and ``download`` have no effect."""

    def __init__(
        self, root: str, train: bool = True, transform: Callable[[Any], Any] | None = None, download: bool = False
    ) -> None:
        part = "train" if train else "t10k"
        self.data = self._read(f"{part}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28)
        self.targets = self._read(f"{part}-labels-idx1-ubyte.gz", header=8)
        self.transform = transform

    @staticmethod
    def _read(name: str, *, header: int) -> Any:
        return np.frombuffer(gzip.decompress((FILES / name).read_bytes()), np.uint8, offset=header)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.data[index]
        return (self.transform(image) if self.transform else image), int(self.targets[index])
