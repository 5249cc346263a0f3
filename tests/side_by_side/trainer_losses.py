"""Trains by the Trainer of transformers and by echelon's, for test_trainer_losses.py; a program for the peers' Python.

On stdin one job a line, as JSON: library, model, samples, folder, and the environment of each rank. The ranks are forks, so
that the imports are paid once. The answer to each job is a line of JSON: what each rank found.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

VOCABULARY, LENGTH, LABELS = 40, 9, 3


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=LENGTH, num_labels=LABELS,
        )
    )  # fmt: skip


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2))


def samples(model: str, n: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(n):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        # Next-word labels: each word counts as a label, so that batches have different weights.
        labels = torch.tensor(i % LABELS) if model == "bert" else ids.masked_fill(mask == 0, -100)
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return rows


def train(library: str, model: str, n: int, folder: str) -> dict[str, Any]:
    package = importlib.import_module(library)
    losses: list[float] = []

    class Recorded(package.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    args = package.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_train_epochs=3,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=4,
        max_grad_norm=0.5,
        label_smoothing_factor=0.1 if model == "bert" else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    torch.manual_seed(3)
    net = {"bert": bert, "gpt2": gpt2}[model]()
    trainer = Recorded(net, args, train_dataset=samples(model, n))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.double().sum().item() for name, value in net.state_dict().items()}
    return {"losses": losses, "logs": logs, "weights": weights, "steps": trainer.state.global_step}


def main() -> None:
    torch.set_num_threads(1)
    for name in ("transformers", "echelon"):
        assert importlib.import_module(name).Trainer
    for name in ("torch._dynamo", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"):
        importlib.import_module(name)  # otherwise every fork would import it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to the original stdout
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork(job, rank) for rank in range(len(job["environs"]))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        found = [json.loads(_file(job, rank).read_text()) if code == 0 else None for rank, code in enumerate(codes)]
        print(json.dumps(found), file=answers, flush=True)


def _file(job: dict[str, Any], rank: int) -> Path:
    return Path(job["folder"]) / f"rank{rank}.json"


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(job["environs"][rank])
    code = 0
    try:
        found = train(job["library"], job["model"], job["samples"], job["folder"])
        _file(job, rank).write_text(json.dumps(found))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001 - printed, and reported by the exit code
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
