"""Provides the names in ``accelerate.commands.launch``, implemented by echelon."""

from echelon.cli.launch_command import launch_command as launch_command, launch_command_parser as launch_command_parser
