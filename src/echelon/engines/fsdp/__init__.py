"""The engine ``fsdp2``, which uses torch's ``fully_shard``."""
