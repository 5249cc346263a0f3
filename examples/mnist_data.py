"""The command line of the MNIST examples, and the dataset, read from this repository or from a folder of torchvision, without download."""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

HERE = Path(__file__).resolve().parent / "data" / "mnist"
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def parse_args() -> argparse.Namespace:
    """Read the command line, the same for every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--data", help="folder with MNIST (default: the repository's own copy)")
    parser.add_argument("--limit", type=int, help="use only the first LIMIT images")
    parser.add_argument("--save", help="file for the trained weights")
    return parser.parse_args()


def mnist(train: bool, folder: str | Path | None = None, limit: int | None = None) -> TensorDataset:
    """Return pairs (image float32 [1, 28, 28] normalized with 0.1307 and 0.3081, label int64), at most ``limit``."""
    images, labels = (_read(_find(Path(folder) if folder else HERE, name)) for name in FILES[train])
    pixels = torch.from_numpy(images[:limit]).float().div_(255).sub_(0.1307).div_(0.3081)
    return TensorDataset(pixels.unsqueeze(1), torch.from_numpy(labels[:limit]).long())


def _find(folder: Path, name: str) -> Path:
    for parent in (folder, folder / "raw", folder / "MNIST" / "raw"):  # torchvision: root/MNIST/raw/, unpacked or not
        for path in (parent / name, parent / f"{name}.gz"):
            if path.is_file():
                return path
    raise SystemExit(
        f"no {name} or {name}.gz in {folder}, {folder}/raw or {folder}/MNIST/raw: give --data the folder that holds MNIST"
    )


def _read(path: Path) -> np.ndarray:
    """Read an IDX file: two zero bytes, the type (8 = uint8), the number of dimensions, their sizes, the data."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes (it starts with {data[:4].hex()}): download MNIST again")
    num_dims = data[3]
    shape = np.frombuffer(data, ">i4", num_dims, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy()
