"""The number of floating-point operations of a traced function, counted in its graph.

A multiply-add counts as two. Convolutions, their gradients and matrix products are counted; elementwise operations,
normalization, pooling and copies are not. Winograd's algorithm counts as its matrix products.
"""

import math

import tensorflow as tf


def count(function) -> int:
    """Count the operations of one call of a ConcreteFunction."""
    return _count(function.graph)


def _count(graph) -> int:
    total = 0
    for op in reachable_ops(graph):
        if op.type in KERNEL_AND_OUTPUT:
            kernel, output = (tuple(tensor.shape) for tensor in KERNEL_AND_OUTPUT[op.type](op))
            total += 2 * math.prod(output) * math.prod(kernel[:3])  # each output is a sum over taps and channels
        elif op.type in ("MatMul", "BatchMatMulV2"):
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += 2 * math.prod(op.outputs[0].shape) * op.inputs[0].shape[-2 if transposed else -1]
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            total += _count(_called_graph(graph, op, "f"))
        elif op.type in ("If", "StatelessIf"):
            total += max(_count(_called_graph(graph, op, branch)) for branch in ("then_branch", "else_branch"))
    return total


def reachable_ops(graph) -> set[tf.Operation]:
    """Return the operations that the graph's outputs and side effects depend on; TensorFlow prunes the others."""
    reachable: set[tf.Operation] = set()
    queue = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    while queue:
        op = queue.pop()
        if op not in reachable:
            reachable.add(op)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return reachable


def _called_graph(graph, op: tf.Operation, attribute: str):
    return graph._get_function(op.get_attr(attribute).name).graph  # TensorFlow has no public way from name to graph


KERNEL_AND_OUTPUT = {  # of the forward convolution that an operation computes, or whose gradient it computes
    "Conv2D": lambda op: (op.inputs[1], op.outputs[0]),
    "Conv2DBackpropInput": lambda op: (op.inputs[1], op.inputs[2]),
    "Conv2DBackpropFilter": lambda op: (op.outputs[0], op.inputs[2]),
}
