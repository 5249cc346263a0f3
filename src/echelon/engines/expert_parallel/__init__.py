"""Expert parallelism: the experts of a mixture-of-experts layer are divided among ranks, and tokens are sent to them."""
