"""MNIST as in tutorials of 2021 and 2022: a plain module, a collator for pairs, and a Trainer subclass with its own loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset
from torchvision import datasets, transforms

from echelon import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2)
        self.fc = nn.Linear(576, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


class MnistTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(inputs["x"])
        loss = F.nll_loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


def collate_fn(examples):
    images = torch.stack([image for image, _ in examples])
    labels = torch.tensor([label for _, label in examples])
    return {"x": images, "labels": labels}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(axis=-1) == labels).mean())}


def main():
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_dataset = Subset(datasets.MNIST("./data", train=True, download=True, transform=transform), range(2000))
    test_dataset = Subset(datasets.MNIST("./data", train=False, transform=transform), range(501))
    torch.manual_seed(0)
    training_args = TrainingArguments(
        "basic-trainer",
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=2,
        learning_rate=3e-3,
        evaluation_strategy="epoch",
        logging_dir="./logs",
        report_to="tensorboard",
        no_cuda=True,
        remove_unused_columns=False,
    )
    trainer = MnistTrainer(
        Net(),
        training_args,
        train_dataset=train_dataset,
        eval_dataset=test_dataset,
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trainer = main()
    metrics = trainer.evaluate()
    print(metrics)
