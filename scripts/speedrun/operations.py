"""The number of floating-point operations of a traced function, counted in its graph.

A multiply-add counts as two. Convolutions, their gradients and matrix products are counted; elementwise operations,
normalization, pooling and copies are not. Taps of a padded convolution that fall outside the image count. Winograd's
algorithm counts as the matrix products that compute it, including its transforms.
"""

import math
from collections import Counter

import tensorflow as tf


def count(function) -> dict[str, int]:
    """Count the operations of one call of a ConcreteFunction, by type: {"Conv2D": .., "MatMul": .., ..}.

    Operations that no result depends on are not counted, because TensorFlow prunes them. A function counts at every
    call. An `If` counts as the branch with the most operations.

    Raises:
      ValueError: an operation has an unknown shape, or stands in a loop; the message names it.
    """
    return dict(_count(function.graph))


def _count(graph) -> Counter[str]:
    totals: Counter[str] = Counter()
    for op in reachable_ops(graph):
        if op.type in COUNTERS:
            totals[op.type] += COUNTERS[op.type](op)
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            totals += _count(_function_graph(graph, op, "f"))
        elif op.type in ("If", "StatelessIf"):
            branches = [_count(_function_graph(graph, op, branch)) for branch in ("then_branch", "else_branch")]
            totals += max(branches, key=Counter.total)
        elif op.type in ("While", "StatelessWhile") and _count(_function_graph(graph, op, "body")):
            raise ValueError(f"the number of iterations of the loop {op.name} is not in the graph; unroll or remove it")
    return totals


def reachable_ops(graph) -> set[tf.Operation]:
    """Return the operations that the graph's outputs and side effects depend on."""
    reachable: set[tf.Operation] = set()
    queue = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    while queue:
        op = queue.pop()
        if op not in reachable:
            reachable.add(op)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return reachable


def _function_graph(graph, op: tf.Operation, attribute: str):
    """Return the graph of a function that `op` calls."""
    return graph._get_function(op.get_attr(attribute).name).graph  # TensorFlow has no public way from name to graph


def _shape(op: tf.Operation, tensor: tf.Tensor) -> tuple[int, ...]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(f"{op.type} {op.name}: {tensor.name} has the unknown shape {tensor.shape}")
    return tuple(tensor.shape)


def _convolution(op: tf.Operation, kernel: tf.Tensor, output: tf.Tensor) -> int:
    """Count a convolution: each output is a sum over the kernel's height, width and, unless depthwise, channels."""
    summed = _shape(op, kernel)[: 2 if op.type.startswith("Depthwise") else 3]
    return 2 * math.prod(_shape(op, output)) * math.prod(summed)


def _matmul(op: tf.Operation) -> int:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return 2 * math.prod(_shape(op, op.outputs[0])) * _shape(op, op.inputs[0])[-2 if transposed else -1]


def _einsum(op: tf.Operation) -> int:
    """Count a product of two tensors. An Einsum of one tensor only sums or transposes, and counts as zero."""
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    if len(terms) < 2:
        return 0
    if any("." in term for term in terms):
        raise ValueError(f"Einsum {op.name}: the ellipsis of {op.get_attr('equation')} cannot be counted")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        sizes.update(zip(term, _shape(op, tensor), strict=True))
    return 2 * math.prod(sizes.values())


CONVOLUTIONS = {
    "": lambda op: _convolution(op, op.inputs[1], op.outputs[0]),
    "BackpropInput": lambda op: _convolution(op, op.inputs[1], op.inputs[2]),
    "BackpropFilter": lambda op: _convolution(op, op.outputs[0], op.inputs[2]),
}
COUNTERS = {
    **{f"Conv2D{suffix}": counter for suffix, counter in CONVOLUTIONS.items()},
    **{f"DepthwiseConv2dNative{suffix}": counter for suffix, counter in CONVOLUTIONS.items()},
    "MatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "Einsum": _einsum,
}
