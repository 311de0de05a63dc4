"""A run on disk: its directory and lock, its checkpoints, reading it, and tables of runs."""
