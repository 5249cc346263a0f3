"""Pipeline parallelism: consecutive parts of a model on different ranks."""
