"""A stand-in for ``torchvision.transforms`` in diffusers' scripts: torchvision's wheel needs the same build of torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from PIL import Image


class InterpolationMode(Enum):
    """Ways to resize, by torchvision's names."""

    BILINEAR = Image.Resampling.BILINEAR
    LANCZOS = Image.Resampling.LANCZOS


class Compose:
    """Calls each transform on the result of the one before."""

    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self._transforms:
            image = transform(image)
        return image


class Lambda:
    """Calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, image: Any) -> Any:
        return self._function(image)


class Resize:
    """Resizes a square image."""

    def __init__(self, size: int, interpolation: InterpolationMode = InterpolationMode.BILINEAR) -> None:
        self._size, self._interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.resize((self._size, self._size), self._interpolation.value)


class RandomHorizontalFlip:
    """Flips half of the images, as the random numbers of torch say."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image


class CenterCrop:
    """Returns a square image of this size as it is."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        assert image.size == (self._size, self._size)
        return image


RandomCrop = CenterCrop


class ToTensor:
    """Returns channels, rows and columns between 0 and 1."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


PILToTensor = ToTensor


class ConvertImageDtype:
    """Converts to a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(self._dtype)


class Normalize:
    """Subtracts a mean and divides by a deviation."""

    def __init__(self, mean: list[float], deviation: list[float]) -> None:
        self._mean, self._deviation = mean[0], deviation[0]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self._mean) / self._deviation
