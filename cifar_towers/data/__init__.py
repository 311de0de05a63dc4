"""CIFAR-10, other sets of TensorFlow Datasets, a folder of pictures or a synthetic set, as arrays in memory; batches of
them; augmentation."""
