"""A small language model and texts of different lengths, for the scripts beside this file."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, IGNORED = 24, 12, -100


def make_texts(count=24):
    random = torch.Generator().manual_seed(0)
    texts = []
    for length in torch.randint(2, LENGTH, (count,), generator=random).tolist():
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=random)
        ids[length:] = 0
        labels = ids.roll(-1)
        labels[length - 1 :] = IGNORED
        texts.append({"input_ids": ids, "labels": labels})
    return texts


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        x = self.embedding(input_ids)
        logits = self.head(x + torch.tanh(self.mix(x)))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / items, "logits": logits}
