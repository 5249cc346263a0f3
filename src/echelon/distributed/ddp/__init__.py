"""torch's DistributedDataParallel: whether all ranks have seen its gradients."""
