"""A stub of torchvision with the parts that the MNIST tutorials use, on the data of the repository."""

from torchvision import datasets, transforms

__all__ = ["datasets", "transforms"]
