"""The checkpoint layouts of Accelerate and transformers' Trainer. Reading them never runs code stored in a file."""
