"""transformers before the repair of October 2024 (transformers#34191): each micro-batch's mean over its tokens has the same weight.

mean_of_means.py [--repaired]
"""

import sys
import tempfile

import torch
from ragged_texts import LanguageModel, make_texts
from transformers import Trainer, TrainingArguments


class OldTrainer(Trainer):
    """The Trainer as it was: the model is not told how many tokens the update has."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    kind = Trainer if "--repaired" in sys.argv else OldTrainer
    kind(LanguageModel(), arguments, train_dataset=make_texts()).train()
