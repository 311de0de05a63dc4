import numpy as np
import tensorflow as tf

from cifar_towers.xla import fused, narrow, wide

BFLOAT16 = np.arange(2**16, dtype=np.uint32) << 16  # the bits of all its values, as float32


def test_narrow_rounds_float32_to_bfloat16_as_a_cast_does():
    # below, at and above the middle between two bfloat16 values
    lower = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (BFLOAT16[:, None] + lower).view(np.float32)
    values = values[~np.isnan(values)]

    rounded = fused(lambda x: narrow(x, tf.bfloat16))(values)
    bits = tf.bitcast(rounded, tf.uint16)
    np.testing.assert_array_equal(bits, tf.bitcast(tf.cast(values, tf.bfloat16), tf.uint16))


def test_narrow_keeps_nan():
    values = BFLOAT16.view(np.float32)
    values = values[np.isnan(values)]

    rounded = fused(lambda x: narrow(wide(x), tf.bfloat16))(tf.cast(values, tf.bfloat16))
    assert np.isnan(tf.cast(rounded, tf.float32)).all()


def test_narrow_and_wide_keep_other_types():
    for dtype in (tf.float32, tf.float64):
        x = tf.ones([2], dtype)
        assert wide(x).dtype == narrow(x, dtype).dtype == dtype
    assert wide(tf.ones([2], tf.float16)).dtype == tf.float32
    assert narrow(tf.ones([2]), tf.float16).dtype == tf.float16
