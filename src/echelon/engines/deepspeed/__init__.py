"""The engine ``deepspeed``, which calls the DeepSpeed library directly."""
