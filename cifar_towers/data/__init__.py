"""CIFAR-10, or a synthetic set of its shape, as arrays in memory; batches of it; augmentation."""
