"""Accuracy and loss over a whole split, each example counted once."""
