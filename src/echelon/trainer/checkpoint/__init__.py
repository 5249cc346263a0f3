"""checkpoint-N: what is saved, and how a training is resumed."""
