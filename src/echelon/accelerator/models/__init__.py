"""Models and their weights as files."""
