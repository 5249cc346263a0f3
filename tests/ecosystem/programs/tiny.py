"""Small models, tokenizers and texts for the programs, made without a download."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

WORDS = [f"w{i}" for i in range(40)]


def texts(number: int, seed: int, least: int = 4, most: int = 12) -> list[str]:
    """Return sentences of different lengths."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(least, most))) for _ in range(number)]


def tokenizer() -> Any:
    """Return a word-level tokenizer with the special tokens of causal and of masked models."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_max_length=64,
    )  # fmt: skip


def causal_model(seed: int = 0) -> Any:
    """Return a Llama of 2 layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=44,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **sizes,
        )
    )


def bert(kind: str = "BertModel", seed: int = 0, **options: Any) -> Any:
    """Return a BERT of 2 layers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=44, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def show(**values: Any) -> None:
    """Print the results as one JSON line, on rank zero."""
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(values), flush=True)


def logged(trainer: Any, *names: str) -> dict[str, list[float]]:
    """Return the logged values of each name."""
    history = trainer.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in names}


def whole(default: int) -> int:
    """Return the samples of a batch: ``default``, or with ``--whole N`` the N samples of the batches of all processes together."""
    return int(sys.argv[sys.argv.index("--whole") + 1]) if "--whole" in sys.argv else default


def share_of(default: int) -> int:
    """Return the samples of one process in a batch: ``default``, or with ``--whole N`` N divided by the number of processes."""
    return whole(default) // (int(os.environ.get("WORLD_SIZE", "1")) if "--whole" in sys.argv else 1)
