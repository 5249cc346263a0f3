"""Token classification of names: labels of -100 are excluded from the metrics."""

import numpy as np
import torch
from small import bert_config, tokenizer_of
from transformers import BertForTokenClassification, DataCollatorForTokenClassification

from echelon import Trainer, TrainingArguments

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
PEOPLE, PLACES = ["王明", "李华", "张伟", "刘洋", "陈静"], ["上海", "广州", "成都", "杭州"]
SENTENCES = ["{p}住在{l}。", "昨天{p}去了{l}看朋友。", "{l}的{p}会唱歌。", "我和{p}从{l}来。"]


def sample(sentence, person, place):
    tags = []
    for piece in sentence.replace("{", " {").replace("}", "} ").split():
        name = {"{p}": "PER", "{l}": "LOC"}.get(piece)
        tags += [1 if name == "PER" else 3, 2 if name == "PER" else 4] if name else [0] * len(piece)
    return {"tokens": list(sentence.format(p=person, l=place)), "ner_tags": tags}


def tokenize_and_align_labels(example):
    encoded = tokenizer(example["tokens"], truncation=True, is_split_into_words=True)
    labels = [-100 if word is None else example["ner_tags"][word] for word in encoded.word_ids()]
    return {**example, **encoded, "labels": labels}


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    found = [p for row, tags in zip(predictions, labels) for p, tag in zip(row, tags) if tag != -100]
    true = [tag for tags in labels for tag in tags if tag != -100]
    right = [p == t for p, t in zip(found, true) if t != 0]
    return {
        "accuracy": float(np.mean(np.array(found) == np.array(true))),
        "recall": float(np.mean(right)),
        "count": len(true),
    }


samples = [sample(sentence, person, place) for sentence in SENTENCES for person in PEOPLE for place in PLACES]
tokenizer = tokenizer_of(["".join(one["tokens"]) for one in samples])
order = np.random.RandomState(0).permutation(len(samples))
dataset = [tokenize_and_align_labels(samples[i]) for i in order]

torch.manual_seed(0)
model = BertForTokenClassification(
    bert_config(
        tokenizer, num_labels=5, id2label=dict(enumerate(LABELS)), label2id={n: i for i, n in enumerate(LABELS)}
    )
)
args = TrainingArguments(
    "bert-ner",
    evaluation_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=3,
    load_best_model_at_end=True,
    learning_rate=5e-3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_train_epochs=5,
    weight_decay=0.01,
    no_cuda=True,
)
trainer = Trainer(
    model,
    args,
    train_dataset=dataset[:57],
    eval_dataset=dataset[57:],
    data_collator=DataCollatorForTokenClassification(tokenizer),
    tokenizer=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
predictions, labels, _ = trainer.predict(dataset[57:])
answers = [predictions.shape[0], labels.shape == predictions.shape[:2]]
print(metrics, answers)
