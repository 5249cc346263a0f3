"""The layout of help pages, and shell completion."""
