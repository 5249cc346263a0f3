"""The names of ``accelerate.utils.rich``."""

from echelon.base.rich_errors import install as install
