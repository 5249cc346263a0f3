"""TrainingArguments: every choice of a training, validated."""
