"""The command-line programs, their flags, and a run as callbacks and Python have it."""
