"""The compute dtype of the towers, and the loss scale that float16 needs."""

import tensorflow as tf

from cifar_towers.hardware import cpuinfo, gpu_compute_capabilities, processor_features
from cifar_towers.towers.placement import HOST, pin_to_device

BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # of processors
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "float64": "float64"}


def choose(precision: str, device: str) -> tuple[str, str]:
    """(`float32`, `bfloat16` or `float16`, reason) for a setting and a kind of device.

    `auto` is bfloat16 where it is native and faster: GPUs of compute capability 8.0 or more, processors with AMX or
    AVX512-BF16, but not Intel's with AVX512-BF16 alone, where it has the rate of float32. Elsewhere it is emulated and
    slow, and `auto` is float32.
    """
    if precision != "auto":
        return precision, "as asked"
    native = native_halves(device)
    if "GPU" in device:
        if "bfloat16" in native:
            return "bfloat16", "the GPU computes it natively"
        return "float32", "the GPU has no bfloat16" + "; --precision=float16 may be faster" * ("float16" in native)
    if cpuinfo("vendor_id") == "GenuineIntel" and processor_features() & BFLOAT16_FEATURES == {"avx512_bf16"}:
        return "float32", "on Intel's processors without AMX, bfloat16 is no faster"
    if native:
        return "bfloat16", f"the processor has {', '.join(sorted(processor_features() & BFLOAT16_FEATURES))}"
    return "float32", "the processor has no bfloat16 of its own"


def native_halves(device: str) -> tuple[str, ...]:
    """The 16-bit types that a kind of device computes natively, the best first; the weakest GPU decides."""
    if "GPU" not in device:
        return ("bfloat16",) if processor_features() & BFLOAT16_FEATURES else ()
    weakest = min(gpu_compute_capabilities(), default=(0, 0))
    return ("bfloat16",) if weakest >= (8, 0) else ("float16",) if weakest >= (7, 0) else ()


class LossScale:
    """Multiplies the loss so that small float16 gradients do not vanish, and divides the gradients again.

    With float16 the scale doubles after 2,000 good steps and halves when a tower overflows, in a step that is skipped.
    With other types the scale is 1 and none of this is in the graph.
    Source: P. Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
    """

    INITIAL, GROWTH_STEPS = 2.0**15, 2000

    def __init__(self, precision: str):
        self.dynamic = precision == "float16"
        self.variables = {}
        if self.dynamic:
            with pin_to_device(HOST):
                self.scale = tf.Variable(self.INITIAL, trainable=False, name="loss_scale")
                self.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="good_steps")
            self.variables = {"scale": self.scale, "good_steps": self.good_steps}

    def value(self) -> tf.Tensor:
        """The current scale, float32."""
        return tf.convert_to_tensor(self.scale) if self.dynamic else tf.constant(1.0)

    def can_shrink(self, scale: float) -> bool:
        """Whether a smaller scale may still prevent the overflow of a step that had this `scale`."""
        return self.dynamic and scale / 2 > 1

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss to differentiate."""
        return loss * self.scale if self.dynamic else loss

    def unscale(self, gradients: list[tuple]) -> list[tuple]:
        """N x (gradient, variable) as if the loss had not been scaled."""
        if not self.dynamic:
            return gradients
        results = []
        for gradient, variable in gradients:
            with tf.device(variable.device):
                gradient = None if gradient is None else gradient / tf.cast(self.scale, gradient.dtype)
            results.append((gradient, variable))
        return results

    def adapt(self, finite: tf.Tensor) -> None:
        """Grows or shrinks the scale after a step in which all results of the towers were `finite`, or not."""
        if not self.dynamic:
            return
        with tf.device(self.scale.device):
            good_steps = tf.where(finite, self.good_steps + 1, 0)
            grow = tf.logical_and(finite, tf.equal(good_steps % self.GROWTH_STEPS, 0))
            shrunk = tf.where(finite, self.scale, tf.maximum(self.scale / 2, 1.0))
            self.scale.assign(tf.where(grow, self.scale * 2, shrunk))
            self.good_steps.assign(good_steps)
