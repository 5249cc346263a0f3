"""The layouts of Accelerate and of transformers' Trainer: each is read and written in one module, without running what a file holds."""
