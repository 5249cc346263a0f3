"""Runs the ``echelon`` command as ``python -m echelon``."""

from echelon.cli.main import main

if __name__ == "__main__":
    main()
