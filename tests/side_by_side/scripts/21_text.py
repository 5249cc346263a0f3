"""Texts of different lengths: a collate function that pads each batch, a schedule with warmup, and an accuracy of all samples."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from show import show
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 16, padding_idx=0)
        self.hidden = torch.nn.Linear(16, 16)
        self.dropout = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(dim=1) / mask.sum(dim=1)
        return self.head(self.dropout(torch.tanh(self.hidden(mean))))


def collate(samples):
    input_ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).float(), "labels": labels}


def texts(count, seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=random).tolist()
    rows = [torch.randint(1, 30, (length,), generator=random) for length in lengths]
    return [{"input_ids": row, "label": int(row.float().mean() > 15)} for row in rows]


set_seed(21)
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
train_loader = DataLoader(texts(64, 0), batch_size=4, shuffle=True, collate_fn=collate)
eval_loader = DataLoader(texts(27, 1), batch_size=4, collate_fn=collate)
model = Classifier()
no_decay = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
optimizer = torch.optim.AdamW(
    [{"params": others, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=0.02
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)

for epoch in range(2):
    model.train()
    for batch in train_loader:
        labels = batch.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**batch), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        show("loss", loss)
        show("width", batch["input_ids"].shape[1])
    model.eval()
    right, count = 0, 0
    for batch in eval_loader:
        labels = batch.pop("labels")
        with torch.no_grad():
            predictions = model(**batch).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += int((predictions == labels).sum())
        count += len(labels)
    show("accuracy", right / count)
    show("evaluated", count)
    show("rates", scheduler.get_last_lr())
