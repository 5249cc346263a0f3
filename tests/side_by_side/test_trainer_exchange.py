"""Training moves from transformers' Trainer to echelon's and back in the middle of an epoch without any change in its results."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

# 13 batches per epoch: with accumulation 3 the last of its 5 updates has one batch; step 7 is in the middle of the second epoch.
PROGRAM = """
import json, sys
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification
import echelon.trainer

here = sys.argv[1]
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, num_labels=3,
)
generator = torch.Generator().manual_seed(0)
data = [
    {
        "input_ids": torch.randint(0, 50, (8,), generator=generator),
        "attention_mask": torch.tensor([1] * (4 + i % 5) + [0] * (4 - i % 5)),
        "labels": torch.tensor(i % 3),
    }
    for i in range(26)
]

def train(library, folder, resume=None, seed=1, **more):
    torch.manual_seed(seed)  # the weights of a resumed run come from the checkpoint
    model = BertForSequenceClassification(config)
    arguments = library.TrainingArguments(
        output_dir=f"{here}/{folder}", use_cpu=True, report_to=[], disable_tqdm=True, seed=3, num_train_epochs=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=5e-3, warmup_steps=3, max_grad_norm=0.5,
        weight_decay=0.1, label_smoothing_factor=0.1, logging_steps=1, save_steps=7, optim="adamw_torch", **more,
    )
    trainer = library.Trainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume and f"{here}/{resume}")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": [entry["step"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "weights": {name: value.flatten().tolist() for name, value in trainer.model.state_dict().items()},
    }

theirs, ours = transformers, echelon.trainer
result = {
    "theirs": train(theirs, "theirs"),
    "ours": train(ours, "ours", checkpoint_format="transformers"),
    "ours from theirs": train(ours, "1", "theirs/checkpoint-7", seed=8, checkpoint_format="transformers"),
    "theirs from ours": train(theirs, "2", "ours/checkpoint-7", seed=8),
    # A second resume, from a checkpoint in echelon's own format.
    "ours from ours": train(ours, "3", "1/checkpoint-10", seed=8, max_steps=10),
}
print("RESULT", json.dumps(result))
"""


def _differs(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float]:
    """Return the largest difference between losses, and between weights."""
    assert found["steps"] == wanted["steps"] == list(range(1, 11))
    assert found["rates"] == pytest.approx(wanted["rates"], rel=1e-12)
    losses = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"]))
    pairs = ((a, b) for name, values in wanted["weights"].items() for a, b in zip(found["weights"][name], values))
    return losses, max(abs(a - b) for a, b in pairs)


def test_each_trainer_resumes_the_others_checkpoint_and_goes_on_as_its_owner(tmp_path: Path, peers: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("ECHELON_CHECKPOINT_FORMAT", None)
    done = subprocess.run(
        [str(peers), "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("RESULT ")[1])
    for one, owner in (
        ("ours", "theirs"),
        ("ours from theirs", "theirs"),
        ("theirs from ours", "ours"),
        ("ours from ours", "theirs"),
    ):
        losses, weights = _differs(found[one], found[owner])
        print(f"{one}: per-step losses within {losses:.1e} of the owner's, weights within {weights:.1e}")
        assert losses <= 1e-6, one
        assert weights <= 1e-6, one
