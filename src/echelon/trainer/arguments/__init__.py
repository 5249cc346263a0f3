"""TrainingArguments: a Trainer's validated settings."""
