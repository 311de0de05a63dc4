"""The parts of a run are made from its settings and its data set."""

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.training.build import make_training_augmentation


def test_images_are_normalized_by_the_moments_of_their_data_set():
    info = CIFAR10._replace(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0))
    augmentation = make_training_augmentation(TrainConfig(), info)
    assert augmentation.mean == info.mean
    assert augmentation.std == info.std
