"""Tensor parallelism: the weights of linear layers and embeddings are split over ranks that read the same samples."""
