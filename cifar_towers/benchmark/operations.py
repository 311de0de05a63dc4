"""How many floating-point operations a traced function takes, read from its graph.

A multiply-add counts as two. Counted are convolutions, their gradients and products of matrices; what is done element
by element, normalised, pooled or moved is not. Taps of a padded convolution that fall outside the image count.
"""

import math
from collections import Counter

import tensorflow as tf

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
IFS = ("If", "StatelessIf")
WHILES = ("While", "StatelessWhile")


def count(function) -> dict[str, int]:
    """Operations of one call of a `tf.function`'s ConcreteFunction, by kind: {"Conv2D": .., "MatMul": .., ..}.

    What the results do not depend on is not counted, as TensorFlow does not run it either. Called functions count
    wherever they are called; of the branches of an `If` the one with the most operations.

    Raises:
      ValueError: an operation whose shapes the graph does not tell, or a loop around some, whose turns it does not
        tell; the message names it.
    """
    return dict(_count(function.graph))


def _count(graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for op in _needed(graph):
        if op.type in COUNTED:
            found[op.type] += COUNTED[op.type](op)
        elif op.type in CALLS:
            found += _count(_called(graph, op, "f"))
        elif op.type in IFS:
            branches = [_count(_called(graph, op, branch)) for branch in ("then_branch", "else_branch")]
            found += max(branches, key=Counter.total)
        elif op.type in WHILES and _count(_called(graph, op, "body")):
            raise ValueError(f"how often the loop {op.name} turns is not in the graph; write it out, or leave it")
    return found


def _needed(graph) -> set[tf.Operation]:
    """The operations that the graph's outputs and side effects come from."""
    needed: set[tf.Operation] = set()
    waiting = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return needed


def _called(graph, op: tf.Operation, attribute: str):
    """The graph of a function that `op` calls."""
    return graph._get_function(op.get_attr(attribute).name).graph  # there is no public way from a name to it


def _size(op: tf.Operation, tensor: tf.Tensor) -> int:
    return math.prod(_shape(op, tensor))


def _shape(op: tf.Operation, tensor: tf.Tensor) -> tuple[int, ...]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(f"{op.type} {op.name}: {tensor.name} has the shape {tensor.shape}, which tells no count")
    return tuple(tensor.shape)


def _convolution(op: tf.Operation, kernel: tf.Tensor, output: tf.Tensor) -> int:
    """Each output value is a sum over the kernel's height, width and channels."""
    return 2 * _size(op, output) * math.prod(_shape(op, kernel)[:-1])


def _depthwise(op: tf.Operation, kernel: tf.Tensor, output: tf.Tensor) -> int:
    return 2 * _size(op, output) * math.prod(_shape(op, kernel)[:2])


def _matmul(op: tf.Operation) -> int:
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return 2 * _size(op, op.outputs[0]) * _shape(op, op.inputs[0])[-2 if transposed else -1]


def _einsum(op: tf.Operation) -> int:
    """Of two tensors; one alone is only summed or turned."""
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    if len(terms) < 2:
        return 0
    if any("." in term for term in terms):
        raise ValueError(f"Einsum {op.name}: the axes behind the dots of {op.get_attr('equation')} are not counted")
    sizes = {
        axis: size
        for term, tensor in zip(terms, op.inputs, strict=True)
        for axis, size in zip(term, _shape(op, tensor), strict=True)
    }
    return 2 * math.prod(sizes.values())


COUNTED = {
    "Conv2D": lambda op: _convolution(op, op.inputs[1], op.outputs[0]),
    "Conv2DBackpropInput": lambda op: _convolution(op, op.inputs[1], op.inputs[2]),
    "Conv2DBackpropFilter": lambda op: _convolution(op, op.outputs[0], op.inputs[2]),
    "DepthwiseConv2dNative": lambda op: _depthwise(op, op.inputs[1], op.outputs[0]),
    "DepthwiseConv2dNativeBackpropInput": lambda op: _depthwise(op, op.inputs[1], op.inputs[2]),
    "DepthwiseConv2dNativeBackpropFilter": lambda op: _depthwise(op, op.outputs[0], op.inputs[2]),
    "MatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "Einsum": _einsum,
}
