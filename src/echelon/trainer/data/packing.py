"""Packs a Trainer's training data, and checks that its model keeps the examples of a row apart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from echelon.accelerator.packed_dataset import PackedDataset
from echelon.accelerator.sequences import cuts_sequences
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.data.collators import PaddingCollator, default_data_collator
from echelon.trainer.data.columns import forward_of
from echelon.trainer.signatures import parameters_of

_NUM_PROBED = 8  # tokens of each of the two examples


def packed(
    args: TrainingArguments, dataset: Any, *, accelerator: Any, collator: Any, shifts_labels: bool, tokenizer: Any
) -> PackedDataset:
    """Return ``dataset`` in rows of ``args.pack_to_length`` tokens.

    Raises:
        UsageError: the data or another setting does not work with packing.
    """
    assert args.pack_to_length is not None
    if not (collator is default_data_collator or isinstance(collator, PaddingCollator)):
        raise UsageError(
            _(
                "pack_to_length makes rows of one length with their labels, which the data_collator ({kind}) would change",
                kind=getattr(collator, "__name__", type(collator).__name__),
            ),
            where="Trainer(data_collator=)",
            do=_("remove data_collator, and add the column 'labels' to the dataset if they are not the tokens"),
        )
    layout = accelerator.session.layout
    if cuts_sequences(accelerator) or (layout is not None and layout.pp_enabled):
        raise UsageError(
            _(
                "pack_to_length does not work with cp_size, sp_size or pp_size, whose attention does not see the positions"
            ),
            where="TrainingArguments.pack_to_length",
            do=_("remove it, or use data, sharded or tensor parallelism"),
        )
    seed = args.seed if args.data_seed is None else args.data_seed
    pad = getattr(tokenizer, "pad_token_id", None)
    return PackedDataset(
        dataset, args.pack_to_length, seed=seed, shifts_labels=shifts_labels, pad_token_id=0 if pad is None else pad
    )


@torch.no_grad()
def require_separate_examples(
    model: nn.Module, inner: nn.Module, rows: PackedDataset, *, num_rows: int, device: torch.device
) -> None:
    """Raise unless the logits of an example are the same whatever precedes it in its row, and as if it were alone.

    Args:
        model: the prepared model.
        inner: the user's model in it.
        rows: the training data.
        num_rows: rows in a forward pass, because some kernels separate the examples of a single row only.

    Collective: call on every rank if the model's forward pass is collective.
    """
    name = type(inner).__name__
    if "position_ids" not in parameters_of(forward_of(inner)):
        raise _not_separate(_("{name}.forward does not take position_ids", name=name))
    tokens = torch.cat([rows[i]["input_ids"] for i in range(min(2, len(rows)))]).to(device)
    size = min(_NUM_PROBED, len(tokens) // 2)
    first, second = tokens[:size], tokens[size : 2 * size]
    positions = torch.arange(size, device=device)
    both = positions.repeat(2).expand(num_rows, -1)

    def logits_of(ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        outputs = model(input_ids=ids.expand(num_rows, -1), position_ids=position_ids)
        found: torch.Tensor = outputs["logits"]
        return found[:, -size:]

    was_training = model.training
    model.eval()
    try:
        after = logits_of(torch.cat([first, second]), both)
        after_another = logits_of(torch.cat([first.flip(0).roll(1), second]), both)
        alone = logits_of(second, positions.expand(num_rows, -1))
    finally:
        model.train(was_training)
    eps, largest = torch.finfo(alone.dtype).eps, float(alone.abs().max())
    # Bit-equal in most models; kernels of experts may sum in another order.
    if float((after.double() - after_another.double()).abs().max()) > 4 * eps * largest:
        raise _not_separate(_("the outputs of {name} for an example depend on the one before it in the row", name=name))
    if not float((after.double() - alone.double()).abs().max()) <= math.sqrt(eps) * largest:
        raise _not_separate(_("the outputs of {name} for an example are not those that it has alone", name=name))


def _not_separate(what: str) -> UsageError:
    return UsageError(
        _("pack_to_length: {what}, so packed training would not be that of the examples", what=what),
        where="TrainingArguments.pack_to_length",
        do=_(
            "remove it, load the model with attn_implementation='sdpa', or set per_device_train_batch_size=1 (flash attention "
            "separates the examples of a single row only)"
        ),
    )
