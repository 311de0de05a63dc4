"""The training run: state, step, loop, and what they are made of."""
