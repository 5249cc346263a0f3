"""The ``echelon`` command line, with one file per subcommand."""
