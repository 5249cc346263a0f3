"""Testing tools for extension authors."""
