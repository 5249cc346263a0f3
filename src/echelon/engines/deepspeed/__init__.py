"""The engine ``deepspeed``: the DeepSpeed library, called directly."""
