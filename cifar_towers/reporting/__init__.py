"""What a run tells: to the terminal, to files, to TensorBoard."""
