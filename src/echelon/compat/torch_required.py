"""Raises an error with the install command, when it is imported, if torch is not installed. It does not import torch."""

from __future__ import annotations

from echelon.base.optional import explain_missing_torch, is_available

if not is_available("torch"):
    raise explain_missing_torch(ModuleNotFoundError(name="torch"))
