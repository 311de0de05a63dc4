"""A traced step as TensorBoard's GRAPHS should draw it: towers side by side between the batch and the mean."""

import re
from collections.abc import Mapping

from tensorflow.core.framework.graph_pb2 import GraphDef

# Names of operations, and of the boxes they are drawn in. A tower's backward pass belongs to the tower; what stands
# alone is gathered, as TensorBoard sets boxes aside when there are many.
BOXES = (
    (r"gradient_tape/((?:proxy/)?tower_\d+)/(.+)", r"\1/gradients/\2"),
    (r"((?:batch|rates|look)(?:_\d+)?)", r"inputs/\1"),
    (r"((?:Identity|NoOp)(?:_\d+)?)", r"results/\1"),
    (r"([^/]+)", r"step/\1"),
)


def drawn(graph: GraphDef, variables: Mapping[str, str]) -> GraphDef:
    """The graph with its operations renamed, and without the functions it calls, which would be drawn beside it.

    Args:
      variables: names of variables by the names of the placeholders that stand for them. Each is drawn in a box of
        all variables; where it was first read, which is in the first tower, the others would seem to read it there.
    """
    alone = {node.name for node in graph.node if "/" not in node.name}
    names = {node.name: _box(node.name, alone, variables) for node in graph.node}
    shown = GraphDef(versions=graph.versions)
    for node in graph.node:
        copy = shown.node.add()
        copy.CopyFrom(node)
        copy.name = names[node.name]
        copy.attr.pop("_class", None)
        for index, source in enumerate(node.input):
            control, name, output = re.fullmatch(r"(\^?)([^:]+)(.*)", source).groups()
            copy.input[index] = control + names[name] + output
    return shown


def _box(name: str, alone: set[str], variables: Mapping[str, str]) -> str:
    """The name under which an operation is drawn; `alone` are those that are in no scope."""
    if name in variables:
        return f"variables/{variables[name]}"
    head, slash, rest = name.partition("/")
    whole = head if head in alone else name  # a scope may bear the name of an operation that stands alone
    for pattern, box in BOXES:
        if found := re.fullmatch(pattern, whole):
            return found.expand(box) + (slash + rest if whole == head else "")
    return name
