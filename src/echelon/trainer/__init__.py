"""LEVEL 3: the Trainer. Floor 10."""
