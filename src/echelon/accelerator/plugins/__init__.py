"""Options passed to the Accelerator as objects, under Accelerate's names and defaults."""
