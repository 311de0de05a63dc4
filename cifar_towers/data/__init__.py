"""Data sets as arrays in memory, batches of them, and augmentation."""
