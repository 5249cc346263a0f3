"""Saves and loads training state, in echelon's own and in other libraries' layouts."""
