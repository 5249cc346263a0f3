"""The ``fsdp2`` engine, which uses torch's ``fully_shard``."""
