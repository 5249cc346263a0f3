"""Re-exports the names of ``accelerate.commands.launch``."""

from echelon.cli.launch_command import launch_command as launch_command, launch_command_parser as launch_command_parser
