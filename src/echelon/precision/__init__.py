"""The dtype of the forward pass, and the loss scaling that fp16 needs."""
