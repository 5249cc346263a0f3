"""Layers in canonical chunks: tensor parallelism whose results have the same bits on any number of ranks (``parity="bitwise"``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from echelon.accelerator.compile import is_compiled
from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
from echelon.accelerator.session import Session
from echelon.base.errors import ConfigError, UsageError
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig

_DEFAULT = 8
_CODE = "code TorchTensorParallelConfig({}=)"
_COMPILED = (
    "torch.compile does not support layers that compute their canonical chunks one by one",
    "remove torch.compile, or use parity='exact'",
)


def canonical_chunks_of(config: Resolved[RunConfig], layout: ParallelismConfig | None) -> int | None:
    """Return the number of chunks in which split layers are computed; None if no layers are split, or not bit for bit.

    Raises:
        ConfigError: a setting does not work with chunks, or with another mode of parity.
    """
    handler = None if layout is None else layout.tp_handler
    given = None if handler is None else handler.canonical_chunks
    if config.value.parity != "bitwise":
        if given is not None:
            raise ConfigError(
                f"canonical_chunks={given} has no effect, because parity is {config.value.parity!r}",
                where=_CODE.format("canonical_chunks"),
                do="set parity='bitwise', or remove canonical_chunks",
            )
        return None
    if layout is None or (handler is None and not layout.tp_enabled):
        return None
    num_chunks: int = _DEFAULT if given is None else given
    if num_chunks % layout.tp_size:
        raise ConfigError(
            f"tp_size={layout.tp_size} does not divide canonical_chunks={num_chunks}, the parts of each layer that the ranks share",
            where=_CODE.format("canonical_chunks"),
            do="choose a power of two as tp_size, and canonical_chunks as large as the largest tp_size of all runs that must match",
        )
    if handler is not None and handler.loss_parallel:
        raise ConfigError(
            "loss_parallel=True computes the cross-entropy from the ranks' parts of the vocabulary, in an order that depends on their "
            "number",
            where=_CODE.format("loss_parallel"),
            do="remove loss_parallel and gather the logits ('colwise_gather_output'), or use parity='exact'",
        )
    if config.value.dynamo_backend != "no":
        what, do = _COMPILED
        raise ConfigError(what, where=str(config.origins["dynamo_backend"]), do=do)
    return num_chunks


def prepare_canonical_chunks(session: Session, models: Sequence[nn.Module]) -> None:
    """Make the layers of ``models`` compute in chunks if the run does and layers are not split over ranks; then the engine does it.

    Raises:
        ConfigError: a layer cannot be divided.
        UsageError: a model is compiled.
    """
    layout = session.layout
    num_chunks = canonical_chunks_of(session.config, layout)
    if num_chunks is None or layout is None:
        return
    if any(is_compiled(module) for model in models for module in model.modules()):
        what, do = _COMPILED
        raise UsageError(what, where="prepare(), parity='bitwise'", do=do)
    if layout.tp_enabled:
        return
    # Runs that do not split layers do not import torch's tensor parallelism.
    from echelon.engines.tensor_parallel.parallelize import divide_into_chunks  # noqa: PLC0415

    plan = (layout.tp_handler.plan if layout.tp_handler else None) or {}
    for model in models:
        divide_into_chunks(model, plan, num_chunks=num_chunks)
