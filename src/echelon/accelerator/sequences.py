"""``Accelerator.context_parallel``: sequences that are cut over the ranks of the axis ``cp`` or ``sp``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.engines.chunked_loss import (
    ChunkedLoss as ChunkedLoss,
    is_causal as is_causal,
    why_not_chunked as why_not_chunked,
)
from echelon.engines.context_parallel.region import SequencePiece, current_region, sequence_region
from echelon.engines.context_parallel.sequence_group import SequenceGroup
from echelon.engines.context_parallel.sequence_mask import SequenceMask, documents_of_lengths, shift_labels
from echelon.engines.context_parallel.sequence_order import SequenceOrder
from echelon.engines.context_parallel.transformers_attention import attach, attention_replaced, pretrained_models

if TYPE_CHECKING:
    from echelon.accelerator.plugins.parallelism_config import ParallelismConfig
    from echelon.accelerator.session import Session

__all__ = [
    "attach_sequence_parallel",
    "context_parallel",
    "cuts_sequences",
    "maybe_context_parallel",
    "shift_labels",
]


@contextmanager
def maybe_context_parallel(
    self: Any,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Cut ``buffers`` over the ranks of a sequence inside the block; see ``context_parallel``. Without cp and sp, do nothing."""
    layout = self.session.layout
    if layout is None or not (layout.cp_enabled or layout.sp_enabled):
        yield
        return
    with context_parallel(self, buffers, buffer_seq_dims, no_restore_buffers):
        yield


@contextmanager
def context_parallel(
    self: Any,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
    *,
    document_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
) -> Iterator[SequencePiece]:
    """Cut ``buffers`` over the ranks of a sequence inside the block, and compute attention over the whole sequence.

    Run the forward and backward pass of one batch inside. ``torch.nn.functional.scaled_dot_product_attention`` and prepared models
    of transformers compute attention over all ranks; documents and padding are found in what transformers' models are called with.
    Shift labels before the block (``echelon.utils.shift_labels``). With ``cp_size`` and ``sp_size`` of 1 nothing is cut.

    Args:
        buffers: tensors with whole sequences: inputs, labels, position ids. They are cut in place, and are whole again after the block.
        buffer_seq_dims: the dimension of the sequence in each of them (default: 1).
        no_restore_buffers: those of ``buffers`` that stay cut.
        document_ids: (batch or 1, length), whole: positions see only positions with the same number.
        cu_seqlens: first positions of the documents, and the length, instead of ``document_ids``.
        padding_mask: (batch, length), whole: False or 0 for padding, which nothing sees.

    Yields:
        A ``SequencePiece``: ``positions`` of this rank's piece, for models that number positions themselves.

    Collective: on the ranks of a sequence, with the same whole sequences.

    Raises:
        ConfigError: the length cannot be divided among the ranks.
        UsageError: the block contains attention that cannot be computed this way.

    Examples:
        >>> with accelerator.context_parallel([input_ids, labels], buffer_seq_dims=[1, 1]):  # doctest: +SKIP
        ...     accelerator.backward(model(input_ids, shift_labels=labels).loss)
    """
    given = [] if buffers is None else list(buffers)
    dims = [1] * len(given) if buffer_seq_dims is None else list(buffer_seq_dims)
    session: Session = self.session
    group, method = _group_of(session.layout)
    length = given[0].shape[dims[0]] if given and dims else 0
    mask = _mask_of(document_ids, cu_seqlens, padding_mask, length)
    if group.size == 1 and mask.is_empty:
        device = given[0].device if given else session.world.device
        yield SequencePiece(length=length, positions=torch.arange(length, device=device))
        return
    _check_fixed_length(session.layout, length)
    models = pretrained_models(session.objects.models)
    with (
        attention_replaced(models),
        sequence_region(
            group,
            method=method,
            buffers=given,
            buffer_seq_dims=dims,
            no_restore_buffers=list(no_restore_buffers or ()),
            mask=mask,
        ) as region,
    ):
        yield region.piece
        if not region.num_attended:
            warn(
                _(
                    "no attention was computed inside accelerator.context_parallel(), so each rank used only its own "
                    "piece of the sequence. Use torch.nn.functional.scaled_dot_product_attention or a prepared model "
                    "of transformers"
                )
            )


def attach_sequence_parallel(session: Session, model: nn.Module, *, parts: Sequence[nn.Module] = ()) -> None:
    """Make ``model`` notice a forward pass outside ``context_parallel``, and models of transformers in it work inside.

    ``parts``: the modules that compute the model on this rank in its place (the stages of a pipeline).
    """
    if session.layout is None:
        return
    group = _group_of(session.layout)[0]
    if group.size == 1:
        return

    handles: list[Any] = []
    setting = f"{'cp' if session.layout.cp_enabled else 'sp'}_size={group.size}"

    def check(module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()) or current_region() is not None:
            return
        for handle in handles:
            handle.remove()  # one warning
        warn(
            _(
                "{setting}, but {name} ran outside accelerator.context_parallel(), so each of the {size} ranks "
                "computes the whole sequence. Run the forward and backward pass inside `with "
                "accelerator.context_parallel(buffers=[input_ids, labels, position_ids], buffer_seq_dims=[1, 1, 1])`",
                setting=setting,
                name=type(model).__name__,
                size=group.size,
            )
        )

    handles += [part.register_forward_pre_hook(check, prepend=True) for part in parts or (model,)]
    for pretrained in pretrained_models(parts or (model,)):
        attach(pretrained)


def cuts_sequences(accelerator: Any) -> bool:
    """Return whether ``context_parallel`` of ``accelerator`` cuts sequences over several ranks."""
    layout = accelerator.session.layout
    return layout is not None and (layout.cp_enabled or layout.sp_enabled)


def _group_of(layout: ParallelismConfig | None) -> tuple[SequenceGroup, Literal["ring", "ulysses"]]:
    if layout is None or layout.device_mesh is None or not (layout.cp_enabled or layout.sp_enabled):
        return SequenceGroup(group=None, rank=0, order=SequenceOrder(num_ranks=1, zigzag=False)), "ring"
    axis = "cp" if layout.cp_enabled else "sp"
    mesh = layout.device_mesh
    order = SequenceOrder(num_ranks=mesh[axis].size(), zigzag=layout.cp_enabled)
    exchange: Any = layout.cp_handler.cp_comm_strategy if layout.cp_enabled else "alltoall"
    group = SequenceGroup(group=mesh.get_group(axis), rank=mesh.get_local_rank(axis), order=order, exchange=exchange)
    return group, "ring" if layout.cp_enabled else "ulysses"


def _mask_of(
    document_ids: torch.Tensor | None, cu_seqlens: torch.Tensor | None, padding_mask: torch.Tensor | None, length: int
) -> SequenceMask:
    if document_ids is not None and cu_seqlens is not None:
        raise UsageError(
            "document_ids and cu_seqlens both give the documents", where="context_parallel()", do="pass one of them"
        )
    documents = document_ids if cu_seqlens is None else documents_of_lengths(cu_seqlens, length)
    for name, tensor in {"document_ids": documents, "padding_mask": padding_mask}.items():
        if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != length):
            raise UsageError(
                f"{name} has shape {tuple(tensor.shape)}, but the whole sequence has {length} positions",
                where=f"context_parallel({name}=)",
                do="pass a tensor of shape (batch, length) that is not cut and not one of buffers=",
            )
    real = None if padding_mask is None else padding_mask.bool()
    # Copies, because a tensor that is also one of the buffers is cut in place.
    return SequenceMask(
        documents=None if documents is None else documents.clone(), is_real=None if real is None else real.clone()
    )


def _check_fixed_length(layout: ParallelismConfig | None, length: int) -> None:
    if layout is None or not layout.sp_enabled:
        return
    handler = layout.sp_handler
    if not handler.sp_seq_length_is_variable and handler.sp_seq_length != length:
        raise ConfigError(
            f"a sequence has {length} positions, but sp_seq_length={handler.sp_seq_length}",
            where="code DeepSpeedSequenceParallelConfig(sp_seq_length=)",
            do="set sp_seq_length_is_variable=True",
        )
