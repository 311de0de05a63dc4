"""Small models for tests that do not depend on the model."""

import keras
from keras import layers


def tiny(image_size, num_classes):
    """Make a convolution, batch norm, dropout and a dense layer with weight loss: all kinds of
    variables.
    """
    images = keras.Input((image_size, image_size, 3))
    x = layers.Conv2D(8, 3, 2, use_bias=False)(images)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("silu")(x)
    x = layers.Dropout(0.2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(
        images, layers.Dense(num_classes, kernel_regularizer=keras.regularizers.L2(1e-3))(x)
    )


def without_weight_loss(image_size, num_classes):
    """Make a convolution, batch norm, dropout and a dense layer, whose sums have one order on
    towers and on workers.
    """
    images = keras.Input((image_size, image_size, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 5, strides=4, activation="silu")(images))
    x = layers.Dropout(0.2, seed=1)(layers.Flatten()(x))
    return keras.Model(images, layers.Dense(num_classes)(x))


def dropping(image_size, num_classes):
    """Drop half of the pixels before a dense layer."""
    images = keras.Input((image_size, image_size, 3))
    return keras.Model(
        images, layers.Dense(num_classes)(layers.Flatten()(layers.Dropout(0.5)(images)))
    )


def plain(image_size, num_classes, regularizer=None):
    """Make a dense layer."""
    images = keras.Input((image_size, image_size, 3))
    return keras.Model(
        images, layers.Dense(num_classes, kernel_regularizer=regularizer)(layers.Flatten()(images))
    )


def regularized(image_size, num_classes):
    """Make a dense layer with weight loss."""
    return plain(image_size, num_classes, keras.regularizers.L2(1e-3))
