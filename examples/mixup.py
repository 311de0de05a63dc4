"""Mixup of neighbors in the batch (H. Zhang et al., arXiv 1710.09412). Each tower needs an even
number of images.

cifar-towers train --recipe=speed94 --augment=examples/mixup.py:mixup --train_dir=runs/mixup
"""

import tensorflow as tf


def mixup(images, labels, draws):
    """Return [b, s, s, 3] images and [b, classes] labels, each mixed with its neighbor's."""
    share = tf.maximum(draws[:, 0], 1 - draws[:, 0])

    def mix(rows):
        partners = tf.reshape(
            tf.reverse(tf.reshape(rows, [-1, 2, *rows.shape[1:]]), [1]), tf.shape(rows)
        )
        weight = tf.reshape(share, [-1] + [1] * (len(rows.shape) - 1))
        return weight * rows + (1 - weight) * partners

    return mix(images), mix(labels)
