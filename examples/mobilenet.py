r"""MobileNetV2 of Keras, trained on towers.

cifar-towers train --model=examples/mobilenet.py:net --precision=float32 --optimizer=adamw \
    --learning_rate=0.001
"""

import keras


def net(image_size, num_classes):
    """Return a model of normalized images [B, image_size, image_size, 3] with logits [B,
    num_classes].
    """
    return keras.applications.MobileNetV2(
        (image_size, image_size, 3),
        alpha=0.35,
        weights=None,
        classes=num_classes,
        classifier_activation=None,
    )
