"""Test tools for authors of extensions."""
