"""Good and bad Chinese reviews: tokenizer=, f1 for the best model, early stopping, and a pipeline with the saved model."""

import numpy as np
import torch
from small import bert_config, tokenizer_of
from torch.utils.data import Dataset
from transformers import BertForSequenceClassification, pipeline

from echelon import EarlyStoppingCallback, Trainer, TrainingArguments

PLACES = ["酒店", "房间", "早餐", "服务", "位置", "前台", "电脑", "屏幕", "键盘", "书", "快递", "价格"]
GOOD = ["很好", "不错，下次还来", "非常满意", "很干净，推荐", "让人喜欢"]
BAD = ["太差", "很脏，不会再来", "非常失望", "有问题，不推荐", "让人生气"]


class ReviewDataset(Dataset):
    def __init__(self, encodings, labels):
        self.encodings = encodings
        self.labels = labels

    def __getitem__(self, idx):
        item = {key: torch.tensor(value[idx]) for key, value in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item

    def __len__(self):
        return len(self.labels)


def compute_metrics(pred):
    labels, preds = pred.label_ids, pred.predictions.argmax(-1)
    hits = int(((preds == 1) & (labels == 1)).sum())
    return {"accuracy": float((preds == labels).mean()), "f1": 2 * hits / int((preds == 1).sum() + (labels == 1).sum())}


reviews = [(place + words, int(words in GOOD)) for place in PLACES for words in GOOD + BAD]
order = np.random.RandomState(0).permutation(len(reviews))
texts, labels = [reviews[i][0] for i in order], [reviews[i][1] for i in order]
tokenizer = tokenizer_of(texts)
train_dataset = ReviewDataset(tokenizer(texts[:95], truncation=True, padding=True), labels[:95])
val_dataset = ReviewDataset(tokenizer(texts[95:], truncation=True, padding=True), labels[95:])

torch.manual_seed(0)
model = BertForSequenceClassification(bert_config(tokenizer, num_labels=2, id2label={0: "bad", 1: "good"}))
training_args = TrainingArguments(
    output_dir="./results",
    num_train_epochs=8,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    learning_rate=5e-3,
    warmup_ratio=0.1,
    weight_decay=0.01,
    logging_dir="./logs",
    logging_steps=5,
    evaluation_strategy="steps",
    eval_steps=5,
    save_strategy="steps",
    save_steps=5,
    save_total_limit=3,
    load_best_model_at_end=True,
    metric_for_best_model="f1",
    no_cuda=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=val_dataset,
    tokenizer=tokenizer,
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=6)],
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model("./best")
trainer.tokenizer.save_pretrained("./best_tokenizer")

classifier = pipeline("text-classification", model="./best", tokenizer="./best", device="cpu")
answers = [found["label"] for found in classifier(["酒店很干净，推荐", "房间太差"])]
print(metrics, answers)
