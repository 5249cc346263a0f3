"""A loop in the style of the GLUE examples: Accelerator, schedule, metrics, checkpoints, resume."""

import math
import sys

import tiny
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, get_scheduler


def build(accelerator: Accelerator, tokenizer):
    def rows(number: int, seed: int) -> Dataset:
        lines = tiny.texts(number, seed)
        data = Dataset.from_dict({"text": lines, "labels": [int("w1" in line.split()) for line in lines]})
        with accelerator.main_process_first():
            return data.map(lambda row: tokenizer(row["text"]), batched=True, remove_columns=["text"])

    collator = DataCollatorWithPadding(tokenizer)
    train = DataLoader(rows(48, 1), shuffle="--in-order" not in sys.argv, collate_fn=collator, batch_size=4)
    held = DataLoader(rows(19, 2), collate_fn=collator, batch_size=4)
    model = tiny.bert("BertForSequenceClassification", num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = 3 * math.ceil(len(train) / 2)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    return accelerator.prepare(model, optimizer, train, held, schedule)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    get_logger(__name__).info("starts", main_process_only=True)
    set_seed(7)
    model, optimizer, train, held, schedule = build(accelerator, tiny.tokenizer())
    losses, accuracies, rates = [], [], []

    def epoch(number: int) -> None:
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        right = total = 0
        for batch in held:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right, total = right + int((predictions == labels).sum()), total + len(labels)
        accuracies.append([right, total])
        rates.append(schedule.get_last_lr()[0])

    epoch(0)
    epoch(1)
    accelerator.save_state("state")
    epoch(2)
    after = losses[-12:]
    accelerator.load_state("state")
    epoch(2)
    resumed = losses[-len(after) :]
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tiny.show(
            losses=losses, accuracies=accuracies, rates=rates, resumed=max(abs(a - b) for a, b in zip(after, resumed))
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
