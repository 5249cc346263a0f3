"""Writes a tiny Qwen3, its tokenizer and data for LLaMA-Factory and ms-swift, in the formats of these tools.

``python factories.py FOLDER``, by the python of ``make ecosystem``, with ``programs`` on PYTHONPATH.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROWS = 36

# LLaMA-Factory's configuration file; the cases of ``tools.py`` override keys on the command line, as its users do.
_CONFIG = """model_name_or_path: qwen3-float32
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: sft
dataset_dir: data
template: qwen3_nothink
cutoff_len: 64
overwrite_cache: true
output_dir: out
logging_steps: 1
save_steps: 500
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
max_steps: 6
lr_scheduler_type: cosine
warmup_ratio: 0.1
val_size: 8
per_device_eval_batch_size: 2
eval_strategy: steps
eval_steps: 3
seed: 7
use_cpu: true
disable_tqdm: true
"""


def write_models(folder: Path) -> None:
    """Write ``qwen3-float32`` and ``qwen3-bfloat16``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([*tiny.texts(200, 0), "system user assistant"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=special[0], eos_token=special[2], additional_special_tokens=special[1:2],
        model_max_length=512,
    )  # fmt: skip
    tokenizer.chat_template = _CHAT
    for name in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
            )
        )  # fmt: skip
        model.to(getattr(torch, name)).save_pretrained(folder / f"qwen3-{name}")
        tokenizer.save_pretrained(folder / f"qwen3-{name}")


def write_data(folder: Path) -> None:
    """Write ``dataset_info.json`` with its files for LLaMA-Factory, and a ``.jsonl`` file per kind of training for ms-swift."""
    rng = random.Random(0)

    def text(least: int = 4, most: int = 12) -> str:
        return " ".join(rng.choices(tiny.WORDS, k=rng.randint(least, most)))

    def turns() -> list[dict[str, str]]:
        return [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]

    def pair() -> dict[str, Any]:
        sides = {side: {"from": "gpt", "value": text()} for side in ("chosen", "rejected")}
        return {"conversations": [{"from": "human", "value": text()}], **sides}

    factory: dict[str, list[Any]] = {
        "sft": [{"instruction": text(), "input": "", "output": text()} for _ in range(_ROWS)],
        "pt": [{"text": text(20, 40)} for _ in range(_ROWS)],
        "pairs": [pair() for _ in range(_ROWS)],
        "feedback": [{"messages": turns(), "label": rng.random() < 0.5} for _ in range(_ROWS)],
    }
    swift: dict[str, list[Any]] = {
        "sft": [{"messages": turns()} for _ in range(_ROWS)],
        "pairs": [{"messages": turns(), "rejected_response": text()} for _ in range(_ROWS)],
        "feedback": [{"messages": turns(), "label": rng.random() < 0.5} for _ in range(_ROWS)],
        "prompts": [{"messages": turns()[:1]} for _ in range(_ROWS)],
    }
    of_pairs = {name: name for name in ("chosen", "rejected")} | {"messages": "conversations"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info: dict[str, Any] = {
        "sft": {"file_name": "sft.json"},
        "pt": {"file_name": "pt.json", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt", "columns": of_pairs},
        "feedback": {
            "file_name": "feedback.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": tags,
        },
    }  # fmt: skip
    (folder / "data").mkdir(parents=True)
    for name, rows in factory.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
    for name, rows in swift.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    (folder / "train.yaml").write_text(_CONFIG)


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
    write_data(Path(sys.argv[1]))
