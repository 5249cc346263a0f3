"""Level 2: a language model on texts of different lengths, where every token counts the same on any number of processes.

A mean over tokens is not the mean of the ranks' means: here, one rank's micro-batch may hold ten times as many tokens as another's.
``backward(loss, num_items=tokens)`` divides each update once, by its tokens on all ranks. With ``parity="exact"``, an update also has
the same texts on any number of processes, so the script can compare itself with a plain loop on one process.

    python examples/ragged_language_model.py
    echelon launch --cpu --num_processes 2 examples/ragged_language_model.py
    torchrun --nproc-per-node 2 examples/ragged_language_model.py
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from echelon import Accelerator

SEED, EPOCHS, BATCH_SIZE, MICRO_BATCH_SIZE = 7, 2, 16, 4
VOCABULARY, PADDING = 64, -100


def make_texts(count=120):
    """Return sequences of 2 to 40 tokens in which each token depends on the one before."""
    random = torch.Generator().manual_seed(0)
    texts = []
    for length in torch.randint(2, 41, (count,), generator=random).tolist():
        steps = torch.randint(1, 4, (length,), generator=random)
        texts.append(steps.cumsum(0) % VOCABULARY)
    return texts


def collate(texts):
    """Return inputs and the next tokens; where a text has ended, the next token is PADDING, which the loss ignores."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=PADDING)
    return inputs, targets


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, inputs):
        return self.head(self.gru(self.embedding(inputs))[0])


def build():
    torch.manual_seed(SEED)
    model = LanguageModel()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train():
    """Train on all processes, and return the Accelerator and the loss of each update."""
    accelerator = Accelerator(parity="exact", seed=SEED, max_micro_batch_size=MICRO_BATCH_SIZE)
    loader = DataLoader(make_texts(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    losses = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
                accelerator.backward(loss, num_items=(targets != PADDING).sum())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:  # the update is complete: this was its last micro-step
                    losses.append(accelerator.update_loss())
    return accelerator, losses


def train_plainly():
    """Train without echelon, on one process and without accumulation, and return the loss of each update."""
    texts, (model, optimizer) = make_texts(), build()
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED + epoch))  # docs/parity.md
        for places in order.split(BATCH_SIZE):
            inputs, targets = collate([texts[place] for place in places])
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main():
    accelerator, losses = train()
    if accelerator.is_main_process:
        expected = train_plainly()
        difference = max(abs(loss - plain) / plain for loss, plain in zip(losses, expected, strict=True))
        print(f"{len(losses)} updates on {accelerator.num_processes} processes, first loss {losses[0]:.5f}")
        print(f"last loss {losses[-1]:.5f}; of a plain loop on one process {expected[-1]:.5f}")
        print(f"largest relative difference of a loss: {difference:.1e}")
        if difference > 1e-4:  # float32 sums in a different order
            sys.exit("the losses differ")
    accelerator.end_training()


if __name__ == "__main__":
    main()
