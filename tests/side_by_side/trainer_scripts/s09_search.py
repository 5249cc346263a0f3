"""A hyperparameter search with optuna, and training with the best values."""

import numpy as np
import optuna
from small import bert_config, tokenizer_of
from transformers import BertForSequenceClassification

from echelon import Trainer, TrainingArguments

random = np.random.RandomState(0)
labels = [int(label) for label in random.randint(0, 2, size=100)]
texts = ["".join(random.choice(list("东西南北"), size=4)) + ("好" if label else "差") for label in labels]
tokenizer = tokenizer_of(texts)
dataset = [{**tokenizer(text), "label": label} for text, label in zip(texts, labels)]


def model_init():
    return BertForSequenceClassification(bert_config(tokenizer, num_labels=2))


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((predictions.argmax(axis=-1) == labels).mean())}


def my_hp_space(trial):
    return {
        "learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 1e-2]),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 2, 3),
    }


def my_objective(metrics):
    return metrics["eval_accuracy"]


args = TrainingArguments(
    "search",
    evaluation_strategy="epoch",
    save_strategy="no",
    per_device_train_batch_size=8,
    disable_tqdm=True,
    no_cuda=True,
)
trainer = Trainer(
    args=args,
    tokenizer=tokenizer,
    model_init=model_init,
    train_dataset=dataset[:75],
    eval_dataset=dataset[75:],
    compute_metrics=compute_metrics,
)
best_run = trainer.hyperparameter_search(
    hp_space=my_hp_space,
    compute_objective=my_objective,
    n_trials=4,
    direction="maximize",
    backend="optuna",
    sampler=optuna.samplers.TPESampler(seed=0),
)
for n, v in best_run.hyperparameters.items():
    setattr(trainer.args, n, v)
trainer.train()
metrics = trainer.evaluate()
metrics["best"] = best_run.objective
answers = best_run.hyperparameters
print(metrics, answers)
