"""Mixed precision: the dtype of the forward pass, and loss scaling for fp16."""
