"""A net for tests that train but do not ask what: all kinds of variables, and compiled in a second."""

import keras
from keras import layers


def tiny(side, num_classes):
    """A convolution, a norm, something that draws, a head with a loss of its own."""
    images = keras.Input((side, side, 3))
    x = layers.Conv2D(8, 3, 2, use_bias=False)(images)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("silu")(x)
    x = layers.Dropout(0.2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(num_classes, kernel_regularizer=keras.regularizers.L2(1e-3))(x))
