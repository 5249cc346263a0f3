"""The engine ``fsdp2``: torch's ``fully_shard``."""
