"""Writes tiny models, their tokenizers and data, under the names that the scripts of ``scripts.py`` are given or have built in.

``python materials.py FOLDER``, by the python of the libraries, with ``programs`` on PYTHONPATH. Data stand in ``FOLDER/1`` and
``FOLDER/2``, for scripts on one and on two processes: on one, the last batch of an evaluation is short; on two, all are whole.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tiny
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "<s>", "</s>"]
_VOCABULARY = {word: i for i, word in enumerate([*_SPECIAL, *tiny.WORDS])}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_CHAT = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
# The tokens between the marks are trained with trl's assistant_only_loss.
_MARKED_CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + ' </s>' }}{% endgeneration %}{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
)

TRAIN_ROWS = 32
MRPC_TRAIN_ROWS = 64  # accelerate's scripts drop the last batch of 16

Row = dict[str, Any]


def _tokenizer(single: str, pair: str | None = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    used = [(token, i) for token, i in _VOCABULARY.items() if token in single]
    core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        unk_token="[UNK]", bos_token="<s>", eos_token="</s>", model_max_length=128,
    )  # fmt: skip


def write_models(folder: Path) -> None:
    """Write each model with its tokenizer, for its class and its config."""
    bert = {"vocab_size": len(_VOCABULARY), "max_position_embeddings": 128, "pad_token_id": 0, **_SIZES}
    ends = {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 6}
    of_pairs = _tokenizer("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    of_text = _tokenizer("$A")
    of_text.chat_template = _CHAT
    llama = transformers.LlamaConfig(
        vocab_size=len(_VOCABULARY), num_key_value_heads=2, max_position_embeddings=256, **ends, **_SIZES
    )
    made: dict[str, tuple[Any, PreTrainedTokenizerFast]] = {
        "bert-base-cased": (lambda: transformers.BertForPreTraining(transformers.BertConfig(**bert)), of_pairs),
        "gpt2": (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(vocab_size=len(_VOCABULARY), n_positions=128, n_embd=32, n_layer=2, n_head=4, **ends)
            ),
            of_text,
        ),
        "llama": (lambda: transformers.LlamaForCausalLM(llama), of_text),
        "HuggingFaceTB/SmolLM-360M": (lambda: transformers.LlamaForCausalLM(llama), of_text),
        "reward": (
            lambda: transformers.LlamaForSequenceClassification(
                transformers.LlamaConfig(**{**llama.to_dict(), "num_labels": 1})
            ),
            of_text,
        ),
        "t5": (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=len(_VOCABULARY), d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4,
                    pad_token_id=0, eos_token_id=6, decoder_start_token_id=0,
                )
            ),
            _tokenizer("$A </s>"),
        ),
        "xlnet": (
            lambda: transformers.XLNetLMHeadModel(
                transformers.XLNetConfig(vocab_size=len(_VOCABULARY), d_model=32, n_layer=2, n_head=4, d_inner=64, **ends)
            ),
            of_pairs,
        ),
    }  # fmt: skip
    for name, (build, tokenizer) in made.items():
        torch.manual_seed(0)
        build().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "chat.jinja").write_text(_MARKED_CHAT)


def write_diffusion(folder: Path) -> None:
    """Write ``diffusion``, a pipeline for images of 16 * 16 pixels, and ``images`` with their texts."""
    ends = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*ends, "w", "w</w>", *(digit + end for digit in "0123456789" for end in ("", "</w>"))]
    tokenizer = transformers.CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16
    )
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=transformers.CLIPTextModel(text), tokenizer=tokenizer, unet=unet,
        scheduler=diffusers.DDPMScheduler(clip_sample=False), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "diffusion")  # fmt: skip
    unconditional = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    }
    unconditional |= {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    diffusers.UNet2DModel(sample_size=16, **unconditional).save_config(folder / "unconditional")
    rng = random.Random(0)
    (folder / "images").mkdir()
    rows = []
    for i in range(16):
        Image.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3)).save(folder / "images" / f"{i:02}.png")
        rows.append(json.dumps({"file_name": f"{i:02}.png", "text": _text(rng, 2, 4)}))
    (folder / "images" / "metadata.jsonl").write_text("\n".join(rows) + "\n")


def _text(rng: random.Random, least: int = 4, most: int = 12) -> str:
    return " ".join(rng.choices(tiny.WORDS, k=rng.randint(least, most)))


def _question(rng: random.Random, i: int) -> Row:
    words = rng.choices(tiny.WORDS, k=20)
    at = rng.randrange(18)
    answer = {"text": [" ".join(words[at : at + 2])], "answer_start": [len(" ".join(words[:at])) + bool(at)]}
    return {"id": str(i), "title": "", "context": " ".join(words), "question": _text(rng, 3, 6), "answers": answer}


def _entities(rng: random.Random) -> Row:
    tokens = rng.choices(tiny.WORDS, k=rng.randint(4, 12))
    return {"tokens": tokens, "ner_tags": ["B-ONE" if token < "w2" else "O" for token in tokens]}


def _choices(rng: random.Random) -> Row:
    endings = {f"ending{i}": _text(rng, 2, 5) for i in range(4)}
    return {"sent1": _text(rng), "sent2": _text(rng, 1, 3), **endings, "label": rng.randrange(4)}


def _pair(rng: random.Random) -> Row:
    return {"sentence1": _text(rng), "sentence2": _text(rng), "label": rng.randrange(2)}


def _translation(rng: random.Random) -> Row:
    text = _text(rng)
    return {"translation": {"en": text, "ro": " ".join(reversed(text.split()))}}


def _chosen(rng: random.Random) -> Row:
    prompt = _text(rng, 2, 5)
    return {"prompt": prompt, "chosen": " " + _text(rng), "rejected": " " + _text(rng)}


_ROWS: dict[str, Callable[[random.Random, int], Row]] = {
    "pairs": lambda rng, i: _pair(rng),
    "regression": lambda rng, i: {"sentence1": _text(rng), "label": rng.random()},
    "entities": lambda rng, i: _entities(rng),
    "choices": lambda rng, i: _choices(rng),
    "questions": _question,
    "summaries": lambda rng, i: {"text": _text(rng, 10, 20), "summary": _text(rng)},
    "translations": lambda rng, i: _translation(rng),
    "texts": lambda rng, i: {"text": _text(rng)},  # "text" is a loader of the library datasets
    "preferences": lambda rng, i: _chosen(rng),
    "comparisons": lambda rng, i: {key: text for key, text in _chosen(rng).items() if key != "prompt"},
    "feedback": lambda rng, i: {"prompt": _text(rng, 2, 5), "completion": " " + _text(rng), "label": i % 2 == 0},
    "prompts": lambda rng, i: {"prompt": _text(rng, 2, 5)},
    "messages": lambda rng, i: {
        "messages": [{"role": "user", "content": _text(rng)}, {"role": "assistant", "content": _text(rng)}]
    },
}


def write_data(folder: Path, held_rows: int, mrpc_held_rows: int) -> None:
    """Write a folder of ``train`` and ``test`` for each kind of row, ``nyu-mll/glue`` and plain texts."""
    for name, make in _ROWS.items():
        for split, rows, seed in (("train", TRAIN_ROWS, 1), ("test", held_rows, 2)):
            rng = random.Random(seed)
            made = [make(rng, i) for i in range(rows)]
            file = folder / name / f"{split}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"data": made})] if name == "questions" else [json.dumps(row) for row in made]
            file.write_text("\n".join(lines) + "\n")
    for split, rows in (("train", TRAIN_ROWS), ("test", held_rows)):
        (folder / f"{split}.txt").write_text("\n".join(tiny.texts(rows, len(split))) + "\n")
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    for split, rows in (("train", MRPC_TRAIN_ROWS), ("validation", mrpc_held_rows), ("test", mrpc_held_rows)):
        rng = random.Random(split)
        (glue / f"{split}.json").write_text("".join(json.dumps({**_pair(rng), "idx": i}) + "\n" for i in range(rows)))
    (glue / "README.md").write_text(_GLUE)
    wikitext = folder / "Salesforce" / "wikitext"
    wikitext.mkdir(parents=True)
    for split, rows, seed in (("train", 500, 1), ("validation", mrpc_held_rows, 2)):
        rng = random.Random(seed)
        (wikitext / f"{split}.json").write_text("".join(json.dumps({"text": _text(rng)}) + "\n" for _ in range(rows)))
    (wikitext / "README.md").write_text(_WIKITEXT)


_GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.json}
  - {split: validation, path: validation.json}
  - {split: test, path: test.json}
dataset_info:
- config_name: mrpc
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - name: label
    dtype: {class_label: {names: {'0': not_equivalent, '1': equivalent}}}
  - {name: idx, dtype: int32}
---
"""

_WIKITEXT = """---
configs:
- config_name: wikitext-2-v1
  data_files:
  - {split: train, path: train.json}
  - {split: validation, path: validation.json}
---
"""


def main() -> None:
    folder = Path(sys.argv[1])
    for number, held_rows, mrpc_held_rows in ((1, 19, 40), (2, 16, 64)):
        write_models(folder / str(number))
        write_diffusion(folder / str(number))
        write_data(folder / str(number), held_rows, mrpc_held_rows)


if __name__ == "__main__":
    main()
