"""Replacements for `from_pretrained`: a tokenizer of single characters and a small BERT."""

from typing import Any

from transformers import BertConfig, BertTokenizer


def tokenizer_of(texts: list[str]) -> BertTokenizer:
    """Return a tokenizer for all characters of ``texts``."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(texts)))]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


def bert_config(tokenizer: BertTokenizer, **more: Any) -> BertConfig:
    """Return the config of a BERT that trains in a second."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.1,
    }
    return BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **{**sizes, **more})
