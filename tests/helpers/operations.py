"""The operations of a traced function."""

import tensorflow as tf

NOT_RUN = {"Const", "NoOp", "Placeholder"}


def reachable(function: tf.types.experimental.ConcreteFunction) -> set[tf.Operation]:
    """Return those that the function's outputs and side effects depend on; TensorFlow prunes the
    others.
    """
    found: set[tf.Operation] = set()
    queue = [tensor.op for tensor in function.graph.outputs] + list(function.graph.control_outputs)
    while queue:
        op = queue.pop()
        if op not in found:
            found.add(op)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def count_launched(function: tf.types.experimental.ConcreteFunction) -> int:
    """Count what the host launches; a function that XLA compiles is one operation."""
    return sum(op.type not in NOT_RUN for op in reachable(function))


def compiled_types(function: tf.types.experimental.ConcreteFunction) -> set[str]:
    """Return the types of the operations in the functions that XLA compiles, with the functions
    that they call.
    """
    library = {each.signature.name: each for each in function.graph.as_graph_def().library.function}
    queue = [
        call.get_attr("f").name
        for call in reachable(function)
        if "PartitionedCall" in call.type and call.get_attr("_XlaMustCompile")
    ]
    types: set[str] = set()
    names: set[str] = set()
    while queue:
        name = queue.pop()
        if name in names:
            continue
        names.add(name)
        for node in library[name].node_def:
            types.add(node.op)
            queue += [value.func.name for value in node.attr.values() if value.func.name]
    return types
