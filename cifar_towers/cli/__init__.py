"""The command-line programs, their flags and their signal handling."""
