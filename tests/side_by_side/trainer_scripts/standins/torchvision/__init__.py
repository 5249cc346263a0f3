"""As much of torchvision as the MNIST tutorials use, on the repository's own data."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
