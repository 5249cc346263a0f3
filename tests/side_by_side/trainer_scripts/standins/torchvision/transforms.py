"""The transforms of the MNIST tutorials, on arrays of bytes [28, 28]."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        return torch.tensor(image).float().div_(255).unsqueeze(0)


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std
