"""Regression of review scores: num_labels=1, float labels, batches grouped by length."""

import numpy as np
import torch
from small import bert_config, tokenizer_of
from transformers import BertForSequenceClassification, DataCollatorWithPadding

from echelon import Trainer, TrainingArguments

WORDS = {"好": 1.0, "棒": 1.0, "差": -1.0, "坏": -1.0, "的": 0.0, "这": 0.0, "是": 0.0}


def compute_metrics_for_regression(eval_pred):
    logits, labels = eval_pred
    errors = logits.reshape(-1) - labels.reshape(-1)
    return {"mse": float((errors**2).mean()), "mae": float(abs(errors).mean())}


random = np.random.RandomState(0)
texts = ["".join(random.choice(list(WORDS), size=random.randint(3, 12))) for _ in range(260)]
scores = [sum(WORDS[letter] for letter in text) / len(text) for text in texts]
tokenizer = tokenizer_of(texts)
dataset = [{**tokenizer(text, truncation=True), "label": score} for text, score in zip(texts, scores)]

torch.manual_seed(0)
model = BertForSequenceClassification(bert_config(tokenizer, num_labels=1, problem_type="regression"))
training_args = TrainingArguments(
    output_dir="./results",
    learning_rate=5e-3,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=8,
    group_by_length=True,
    evaluation_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    metric_for_best_model="mse",
    greater_is_better=False,
    load_best_model_at_end=True,
    weight_decay=0.01,
    no_cuda=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset[:225],
    eval_dataset=dataset[225:],
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics_for_regression,
)
trainer.train()
metrics = trainer.evaluate()
metrics["variance"] = float(np.var(scores[225:]))
print(metrics)
