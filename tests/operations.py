"""The convolutions and matrix products that a traced function runs."""

import tensorflow as tf


def count(function: tf.types.experimental.ConcreteFunction) -> int:
    """Count those that the function's outputs and side effects depend on; TensorFlow prunes the others."""
    reachable: set[tf.Operation] = set()
    queue = [tensor.op for tensor in function.graph.outputs] + list(function.graph.control_outputs)
    while queue:
        op = queue.pop()
        if op not in reachable:
            reachable.add(op)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return sum("Conv2D" in op.type or "MatMul" in op.type for op in reachable)
