"""Shared parts of the examples on Chinese reviews: command line, data, tokenizer and a small BERT."""

import argparse
import csv
import io
import random
from collections import Counter
from pathlib import Path

try:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )
except ModuleNotFoundError as error:
    raise SystemExit(f"these examples need {error.name}, which is not installed: pip install transformers") from error

HERE = Path(__file__).resolve().parent / "data" / "reviews" / "reviews.csv"
LABELS = {0: "差评", 1: "好评"}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def parse_args():
    """Read the command line, the same for every example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", type=Path, default=HERE, help="file with the columns label (1 good, 0 bad) and review")
    parser.add_argument("--model", help="folder of a pretrained model and its tokenizer (default: a small BERT)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="reviews per process and step")
    parser.add_argument("--learning_rate", type=float, help="default: 5e-4 for the small BERT, 3e-5 with --model")
    parser.add_argument("--limit", type=int, help="use only LIMIT reviews")
    parser.add_argument("--text", default="房间很干净，服务热情，下次还来。", help="the review to classify at the end")  # noqa: RUF001
    options = parser.parse_args()
    options.learning_rate = options.learning_rate or (3e-5 if options.model else 5e-4)
    return options


def load(options):
    """Return the training set, the test set (a tenth), the tokenizer, and the model of ``--model`` or a small untrained BERT.

    A sample is a dict of input_ids, attention_mask (lists) and labels; ``DataCollatorWithPadding`` collates the batches.
    """
    reviews = read_reviews(options.csv)
    random.Random(0).shuffle(reviews)
    reviews = reviews[: options.limit]
    test, train = reviews[: len(reviews) // 10], reviews[len(reviews) // 10 :]
    names = {"num_labels": len(LABELS), "id2label": LABELS, "label2id": {name: label for label, name in LABELS.items()}}
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForSequenceClassification.from_pretrained(options.model, **names)
    else:
        tokenizer = character_tokenizer(text for _, text in train)
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
        model = BertForSequenceClassification(
            BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes, **names)
        )

    def encode(label, text):
        tokens = tokenizer(text, truncation=True, max_length=128)
        return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "labels": label}

    return [encode(*review) for review in train], [encode(*review) for review in test], tokenizer, model


def read_reviews(path):
    """Read (label, review) pairs; an invalid row is an error with its line number.

    The text is UTF-8, with or without a byte order mark, or GB18030 (GBK, GB2312), as Chinese versions of Excel write it. Rows
    without a review are skipped with a message.
    """
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: give --csv a file with the columns label and review")
    reader = csv.DictReader(io.StringIO(_decode(path), newline=""), strict=True)
    reviews, empty = [], []
    try:
        if not {"label", "review"} <= set(reader.fieldnames or ()):
            raise SystemExit(f"{path}, line 1: the columns must be label and review, not {reader.fieldnames}")
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            label, text = (row["label"] or "").strip(), (row["review"] or "").strip()
            if None in row:
                raise SystemExit(f"{place}: more columns than in line 1; put a review that contains commas in quotes")
            if label not in ("0", "1"):
                raise SystemExit(f"{place}: the label must be 1 (good) or 0 (bad), not {label!r}")
            reviews.append((int(label), text)) if text else empty.append(reader.line_num)
    except csv.Error as error:
        raise SystemExit(f"{path}, line {reader.reader.line_num}: {error}") from error
    if empty:
        print(f"{path}: {len(empty)} rows without a review are skipped; the first is line {empty[0]}")
    if len(reviews) < 10:
        raise SystemExit(f"{path} has {len(reviews)} reviews; at least 10 are needed")
    return reviews


def _decode(path):
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        is_utf8 = any("\u4e00" <= letter <= "\u9fff" for letter in data[: error.start].decode("utf-8"))
    try:
        if not is_utf8:  # otherwise it is damaged UTF-8, which GB18030 would decode to wrong characters
            return data.decode("gb18030")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
    raise SystemExit(f"{path}, line {line}: neither UTF-8 nor GB18030; open the file in an editor and save it as UTF-8")


def character_tokenizer(texts):
    """Return a tokenizer whose tokens are the characters that occur at least twice in ``texts``."""
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])  # maps full-width letters
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace())
    tokens = [*SPECIAL, *sorted(letter for letter, count in counts.items() if count > 1)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def batches_of(tokenizer):
    """Return a ``collate_fn`` that pads the samples of a batch to the longest one."""
    return DataCollatorWithPadding(tokenizer)


def classify(model, tokenizer, text):
    """Return ``text`` with the label that ``model`` predicts, and its probability."""
    tokens = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(model.device)
    probabilities = model.eval()(**tokens).logits.softmax(dim=1)[0]
    best = int(probabilities.argmax())
    return f"{text} -> {model.config.id2label[best]} ({100 * probabilities[best].item():.1f} %)"
