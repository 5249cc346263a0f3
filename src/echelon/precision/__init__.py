"""Mixed precision: the forward pass's dtype, and loss scaling for fp16."""
