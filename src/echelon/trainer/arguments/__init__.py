"""TrainingArguments: the validated settings of a Trainer."""
