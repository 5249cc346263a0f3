"""LoRA with peft: the adapter is trained, saved, and loaded onto the base model."""

import numpy as np
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from small import bert_config, tokenizer_of
from transformers import BertForSequenceClassification, DataCollatorWithPadding

from echelon import Trainer, TrainingArguments


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((np.argmax(predictions, axis=1) == labels).mean())}


def base_model():
    torch.manual_seed(0)
    return BertForSequenceClassification(bert_config(tokenizer, num_labels=2))


random = np.random.RandomState(0)
labels = [int(label) for label in random.randint(0, 2, size=130)]
texts = ["".join(random.choice(list("东西南北"), size=4)) + ("好" if label else "差") for label in labels]
tokenizer = tokenizer_of(texts)
dataset = [{**tokenizer(text), "labels": label} for text, label in zip(texts, labels)]

peft_config = LoraConfig(
    task_type=TaskType.SEQ_CLS,
    inference_mode=False,
    r=8,
    lora_alpha=32,
    lora_dropout=0.1,
    target_modules=["query", "value"],
)
model = get_peft_model(base_model(), peft_config)
model.print_trainable_parameters()
training_args = TrainingArguments(
    output_dir="bert-lora",
    learning_rate=1e-2,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=6,
    weight_decay=0.01,
    evaluation_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=3,
    load_best_model_at_end=True,
    no_cuda=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset[:101],
    eval_dataset=dataset[101:],
    tokenizer=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model("adapter")

again = PeftModel.from_pretrained(base_model(), "adapter").eval()
batch = tokenizer.pad([{k: v for k, v in row.items() if k != "labels"} for row in dataset[101:]], return_tensors="pt")
with torch.no_grad():
    found = again(**batch).logits.argmax(-1).tolist()
answers = sum(one == label for one, label in zip(found, labels[101:])) / len(found)
print(metrics, answers)
