"""Level 3: the Trainer on texts of different lengths, with accumulation, a loss over tokens, clipping and a schedule."""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from echelon import Trainer, TrainerCallback, TrainingArguments
from tests.mutants.probe import probe

VOCABULARY, LENGTH, IGNORED = 24, 12, -100


def make_texts(count=40):
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
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels=None, **kwargs):
        x = self.embedding(input_ids)
        logits = self.head(x + self.dropout(torch.tanh(self.mix(x))))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        items = kwargs.get("num_items_in_batch", (labels != IGNORED).sum())
        return {"loss": total / items, "logits": logits}


class Probe(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        torch.manual_seed(100 + args.process_index)  # each rank draws its own dropout masks
        probe(lambda: dict(model.state_dict()))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        probe(lambda: dict(model.state_dict()))


def main():
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            seed=5,
            num_train_epochs=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.02,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            max_grad_norm=0.5,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        trainer = Trainer(LanguageModel(), arguments, train_dataset=make_texts(), callbacks=[Probe()])
        trainer.train()


if __name__ == "__main__":
    main()
