"""Training that is stopped and resumed from its last checkpoint gives the same results."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from echelon import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PowerCut(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 8:
            control.should_training_stop = True


def collate_fn(examples):
    return {"x": torch.stack([x for x, _ in examples]), "labels": torch.stack([y for _, y in examples])}


def train(folder, callbacks=()):
    training_args = TrainingArguments(
        output_dir=folder,
        overwrite_output_dir=False,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_ratio=0.2,
        logging_steps=1,
        save_steps=3,
        save_total_limit=3,
        remove_unused_columns=False,
        no_cuda=True,
    )
    last_checkpoint = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    torch.manual_seed(0)
    trainer = Trainer(Net(), training_args, collate_fn, dataset, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=last_checkpoint)
    return trainer


torch.manual_seed(1)
x = torch.randn(100, 8)
dataset = TensorDataset(x, (x[:, :3]).argmax(1))
whole = train("whole")
train("cut", [PowerCut()])
trainer = train("cut")
answers = all(torch.equal(a, b) for a, b in zip(whole.model.state_dict().values(), trainer.model.state_dict().values()))
losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (whole, trainer)]
metrics = {"equal_losses": float(losses[0] == losses[1])}
print(metrics, answers)
