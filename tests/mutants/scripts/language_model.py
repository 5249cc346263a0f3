"""Level 2: a language model on texts of different lengths, with tied weights; every token of an update counts the same."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from echelon import Accelerator
from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, 2, 2, 1.0
VOCABULARY, IGNORED = 24, -100


def make_texts(count=24):
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (count,), generator=random).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]


def collate(texts):
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    labels = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "labels": labels}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Embedding(32, 16)
        self.mix = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x.cumsum(dim=1) / torch.arange(1, ids.shape[1] + 1).unsqueeze(-1)
        return self.head(x + self.dropout(torch.tanh(self.mix(x))))


def main():
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, step_scheduler_with_optimizer=False, seed=11)
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    loader = DataLoader(make_texts(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(100 + accelerator.process_index)  # each rank draws its own dropout masks

    def state():
        return {**(accelerator.get_state_dict(model) or {}), "lr": schedule.get_last_lr()[0]}

    probe(state)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                labels = batch["labels"]
                logits = model(batch["input_ids"])
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
                accelerator.backward(loss, num_items=(labels != IGNORED).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                probe(state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
