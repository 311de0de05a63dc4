"""Names of operations for TensorBoard's GRAPHS: towers side by side between the batch and the mean gradient."""

import re
from collections.abc import Mapping

from tensorflow.core.framework.graph_pb2 import GraphDef

# Operation names -> names to draw. A tower's backward pass is drawn in the tower. Operations outside any scope are
# gathered, as TensorBoard moves boxes aside when there are many.
SCOPES = (
    (r"gradient_tape/((?:proxy/)?tower_\d+)/(.+)", r"\1/gradients/\2"),
    (r"((?:batch|rates|learning_rates|look|collect_diagnostics|stop_signal)(?:_\d+)?)", r"inputs/\1"),
    (r"((?:Identity|NoOp)(?:_\d+)?)", r"results/\1"),
    (r"([^/]+)", r"step/\1"),
)


def relabel(graph: GraphDef, variables: Mapping[str, str]) -> GraphDef:
    """The graph with its operations renamed, without its function library, which would be drawn beside it.

    Variables, {placeholder name: variable name}, are drawn in one box: inside the scope of the first read, which is
    tower 0, all other towers would seem to read from tower 0.
    """
    unscoped = {node.name for node in graph.node if "/" not in node.name}
    names = {node.name: _new_name(node.name, unscoped, variables) for node in graph.node}
    relabeled = GraphDef(versions=graph.versions)
    for node in graph.node:
        copy = relabeled.node.add()
        copy.CopyFrom(node)
        copy.name = names[node.name]
        copy.attr.pop("_class", None)
        for index, source in enumerate(node.input):
            control, name, output = re.fullmatch(r"(\^?)([^:]+)(.*)", source).groups()
            copy.input[index] = control + names[name] + output
    return relabeled


def _new_name(name: str, unscoped: set[str], variables: Mapping[str, str]) -> str:
    if name in variables:
        return f"variables/{variables[name]}"
    head, slash, rest = name.partition("/")
    prefix = head if head in unscoped else name  # a scope may have the name of an operation
    for pattern, replacement in SCOPES:
        if match := re.fullmatch(pattern, prefix):
            return match.expand(replacement) + (slash + rest if prefix == head else "")
    return name
