"""What the user chose, and where each choice came from."""
