"""Option objects that are passed to the Accelerator, with Accelerate's names and defaults."""
