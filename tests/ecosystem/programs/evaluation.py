"""Evaluations of sets whose numbers of rows do not fill the batches of all processes, beside their formulas in plain torch.

Nothing is trained. Each formula is computed by every process for itself. trl's preference loss is a mean over rows, so that it is computed
one row at a time. The loss of a language model is a mean over the tokens of a batch, in an evaluation over those of all processes; the
result is the mean over the rows, each counted once, of the loss of the row's batch in the order of the data.
"""

import os
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer

ROWS = (16, 12, 10, 7)
SIZE = 4


def settings(kind: Any) -> Any:
    return kind(
        output_dir="out", per_device_eval_batch_size=SIZE, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False, seed=7,
    )  # fmt: skip


def preferences(number: int) -> Dataset:
    columns = {"prompt": tiny.texts(number, 5)}
    for seed, name in enumerate(("chosen", "rejected"), 6):
        columns[name] = [f" {text}" for text in tiny.texts(number, seed)]
    return Dataset.from_dict(columns)


def log_probabilities(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log probability of each completion."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    found = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return (found * batch["completion_mask"][:, 1:]).sum(1)


@torch.no_grad()
def preference_losses() -> tuple[list[float], list[float]]:
    model, reference = tiny.causal_model(0).eval(), tiny.causal_model(1).eval()
    found, expected = [], []
    for number in ROWS:
        trainer = DPOTrainer(
            model=tiny.causal_model(0),
            ref_model=tiny.causal_model(1),
            args=settings(DPOConfig),
            train_dataset=preferences(4),
            eval_dataset=preferences(number),
            processing_class=tiny.tokenizer(),
        )
        found.append(trainer.evaluate()["eval_loss"])
        losses = []
        for row in trainer.eval_dataset:
            batch = trainer.data_collator([row])
            chosen, rejected = (log_probabilities(model, batch) - log_probabilities(reference, batch)).tolist()
            losses.append(-F.logsigmoid(torch.tensor(trainer.args.beta * (chosen - rejected), dtype=torch.float64)))
        expected.append(torch.stack(losses).mean().item())
    return found, expected


@torch.no_grad()
def adapter_losses() -> tuple[list[float], list[float]]:
    tokenizer = tiny.tokenizer()
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny.causal_model(), config)
    found, expected = [], []
    for number in ROWS:
        rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in tiny.texts(number, 2)]
        trainer = Trainer(model=model, args=settings(TrainingArguments), eval_dataset=rows, data_collator=collate)
        found.append(trainer.evaluate()["eval_loss"])
        whole = SIZE * int(os.environ.get("WORLD_SIZE", "1"))
        batches = [rows[i : i + whole] for i in range(0, number, whole)]
        expected.append(sum(model.eval()(**collate(batch)).loss.item() * len(batch) for batch in batches) / number)
    return found, expected


def main() -> None:
    dpo, dpo_expected = preference_losses()
    lora, lora_expected = adapter_losses()
    tiny.show(dpo=dpo, dpo_expected=dpo_expected, lora=lora, lora_expected=lora_expected)


if __name__ == "__main__":
    main()
