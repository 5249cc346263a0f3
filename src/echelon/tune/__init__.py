"""``echelon tune``: tries settings on the user's script and this machine."""
