"""Multi-label classification of reviews: a loss in a subclass, a threshold in the metrics."""

import numpy as np
import torch
from small import bert_config, tokenizer_of
from torch import nn
from transformers import BertForSequenceClassification, EvalPrediction, default_data_collator

from echelon import Trainer, TrainingArguments

PARTS = ["房间大", "早餐香", "服务快"]


class MultilabelTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.get("labels")
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = outputs.get("logits")
        loss_fct = nn.BCEWithLogitsLoss()
        loss = loss_fct(
            logits.view(-1, self.model.config.num_labels), labels.float().view(-1, self.model.config.num_labels)
        )
        return (loss, outputs) if return_outputs else loss


def compute_metrics(p: EvalPrediction):
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    chosen = 1 / (1 + np.exp(-preds)) >= 0.5
    hits = np.logical_and(chosen, p.label_ids == 1).sum()
    return {
        "f1": float(2 * hits / (chosen.sum() + (p.label_ids == 1).sum())),
        "exact": float((chosen == p.label_ids).all(1).mean()),
    }


random = np.random.RandomState(0)
texts, labels = [], []
for _ in range(130):
    chosen = random.randint(0, 2, size=3)
    texts.append("酒店" + "".join(part for part, is_in in zip(PARTS, chosen) if is_in) + random.choice(["。", "！"]))
    labels.append([float(is_in) for is_in in chosen])
tokenizer = tokenizer_of(texts)
dataset = [
    {**tokenizer(text, padding="max_length", max_length=16, truncation=True), "labels": label}
    for text, label in zip(texts, labels)
]

torch.manual_seed(0)
model = BertForSequenceClassification(bert_config(tokenizer, num_labels=3, problem_type="multi_label_classification"))
args = TrainingArguments(
    "bert-multilabel",
    overwrite_output_dir=True,
    evaluation_strategy="epoch",
    save_strategy="epoch",
    learning_rate=5e-3,
    per_gpu_train_batch_size=8,
    per_gpu_eval_batch_size=8,
    num_train_epochs=10,
    weight_decay=0.01,
    load_best_model_at_end=True,
    metric_for_best_model="f1",
    save_total_limit=3,
    no_cuda=True,
)
trainer = MultilabelTrainer(
    model,
    args,
    default_data_collator,
    train_dataset=dataset[:101],
    eval_dataset=dataset[101:],
    tokenizer=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
print(metrics)
