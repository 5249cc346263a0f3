"""The command ``echelon``, one file a command."""
