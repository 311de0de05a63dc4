"""A flipped bit in one tower's gradient, as a faulty device or its memory makes it."""

import numpy as np
import tensorflow as tf

from cifar_towers.training import step
from cifar_towers.training.optimizers import variable_name


class BitFlip:
    """Flips a bit of one element of one variable's gradient on a tower, in its next step, or in all if it is `lasting`.

    The repetition of the tower's work by another tower is left as it is. Install it before the step is traced.
    """

    def __init__(self, tower, variable=0.5, element=0.5, bit=12, lasting=False):
        """`variable` and `element` are places in [0, 1) among all variables with a gradient, and among its elements."""
        self.tower, self.variable, self.element, self.bit, self.lasting = tower, variable, element, bit, lasting
        self.name = ""  # of the variable, once a step is traced
        self._mask = None

    def switch(self, on):
        if self._mask is None:
            self._mask = tf.Variable(0)
        self._mask.assign(np.array(1 << self.bit if on else 0, np.uint32).view(np.int32))

    def install(self, patch=setattr):
        average = step.average_gradients  # each tower averages its micro-batches, in its name scope

        def wrapped(gradients, *arguments, **options):
            pairs = list(average(gradients, *arguments, **options))
            if f"tower_{self.tower}" in tf.get_current_name_scope().split("/"):
                present = [index for index, (gradient, _) in enumerate(pairs) if gradient is not None]
                index = present[int(self.variable * len(present))]
                pairs[index] = self._flipped(*pairs[index]), pairs[index][1]
            return pairs

        patch(step, "average_gradients", wrapped)

    def _flipped(self, gradient, variable):
        self.name = variable_name(variable)
        size = gradient.shape.num_elements()
        mask = tf.one_hot(int(self.element * size), size, dtype=tf.int32) * self._mask
        bits = tf.bitwise.bitwise_xor(tf.bitcast(gradient, tf.int32), tf.reshape(mask, gradient.shape))
        if not self.lasting:
            with tf.control_dependencies([bits]):
                self._mask.assign(0)
        return tf.bitcast(bits, gradient.dtype)
