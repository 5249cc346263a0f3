"""The checkpoint layouts of Accelerate and of transformers' Trainer. Reading them never runs code from a file."""
