"""The ``deepspeed`` engine, which calls the DeepSpeed library directly."""
