"""Provides the names in ``accelerate.utils.versions``, implemented by echelon."""

from echelon.base.versions import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
    torch_version as torch_version,
)
