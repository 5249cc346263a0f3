"""Support for torch's DistributedDataParallel."""
