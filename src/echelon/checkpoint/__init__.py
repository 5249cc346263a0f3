"""How checkpoints come onto a disk and go from it."""
