"""Bytes that cross between devices in one call of a traced function."""

import tensorflow as tf

from cifar_towers.towers.placement import HOST, short_device
from scripts.scaling.communication import Traffic
from scripts.speedrun.operations import reachable_ops


def transfers(function, *, scalars: bool = True) -> Traffic:
    """Bytes that cross between devices in one call of a traced step.

    A tensor that is computed on one device and used on another counts once for each such device, as TensorFlow sends
    it. Operations that no result or side effect needs do not count, nor do variable handles and constants without a
    device, which TensorFlow keeps where they are used.

    The device of an operation: an argument's is the host, or that of the captured tensor; a read or an assignment has
    the variable's; others their own, or that of the operation they are colocated with; an identity that of its input;
    the rest the host. A function call is entirely on its own device.

    Args:
      function: a `tf.types.experimental.ConcreteFunction`.
      scalars: count tensors of rank 0 too: losses, learning rates, terms of norms.

    Raises:
      ValueError: a tensor crosses whose bytes are not known before the step runs; or a conditional, a loop or a call
        has no device, so that what is inside may run anywhere.
    """
    where = _devices(function)
    crossed = Traffic()
    for op, source in where.items():
        for tensor in op.outputs:
            used_on = {where.get(consumer, "") for consumer in tensor.consumers()} - {source, ""}
            if source and used_on and tensor.dtype != tf.resource and (scalars or tensor.shape.rank != 0):
                crossed.update({(source, device): _size(tensor) for device in used_on})
    return crossed


def _devices(function) -> dict[tf.Operation, str]:
    """Needed operation -> its device as defined by `transfers`; "" for constants, which are wherever they are used."""
    needed = reachable_ops(function.graph)
    captured = {id(inner): short_device(outer.device) for outer, inner in function.graph.captures}
    where: dict[tf.Operation, str] = {}
    for op in function.graph.get_operations():  # in topological order
        where[op] = _device(op, where, captured)
    return {op: device for op, device in where.items() if op in needed}


def _device(op: tf.Operation, where: dict[tf.Operation, str], captured: dict[int, str]) -> str:
    if op.type == "Placeholder":
        return captured.get(id(op.outputs[0]), HOST)
    calls = any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr)
    if calls and not op.device:
        raise ValueError(f"{op.name} ({op.type}) has no device, so the operations inside may run anywhere")
    handles = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
    if handles and not calls:
        return where[handles[0].op]
    if op.device:
        return short_device(op.device)
    beside = op.colocation_groups()[0].decode().removeprefix("loc:@")
    if beside != op.name:
        return where[op.graph.get_operation_by_name(beside)]
    if op.type == "Identity":
        return where[op.inputs[0].op]
    return "" if op.type == "Const" else HOST


def _size(tensor: tf.Tensor) -> int:
    if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.string, tf.variant):
        raise ValueError(f"{tensor.name}, {tensor.dtype.name} {tensor.shape}, is sent, and its size is unknown")
    return tensor.shape.num_elements() * tensor.dtype.size
