"""Writing files whole, and the names of the files in a run's directory."""
