import tensorflow as tf

from cifar_towers.reporting.graph_layout import relabel
from cifar_towers.towers import average_gradients, run_on_towers, split_batch


def traced(towers):
    weight = tf.Variable([[2.0]], name="layer/kernel")

    def on_tower(_, shard):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((shard @ weight) ** 2)
        return [(tape.gradient(loss, weight), weight)]

    @tf.function(autograph=False)
    def step(batch):
        gradients = average_gradients(run_on_towers(on_tower, towers, split_batch(batch, towers)))
        for gradient, variable in gradients:
            variable.assign_sub(gradient)

    return weight, step.get_concrete_function(tf.TensorSpec([9, 1]))


def test_towers_are_drawn_side_by_side(towers):
    weight, function = traced(towers(3))
    ((_, placeholder),) = [pair for pair in function.graph.captures if pair[0] is weight.handle]
    assert placeholder.op.name.startswith("tower_0/")  # where the variable was first read
    graph = function.graph.as_graph_def()
    shown = relabel(graph, {placeholder.op.name: "layer/kernel"})
    names = {node.name for node in shown.node}
    assert len(names) == len(graph.node) and "variables/layer/kernel" in names
    assert {f"tower_{k}" for k in range(3)} <= {name.split("/")[0] for name in names}
    assert not [name for name in names if name.startswith("gradient_tape") or "/" not in name]
    assert [name for name in names if name.startswith("tower_2/gradients/")]
    for node in shown.node:
        sources = [source.lstrip("^").split(":")[0] for source in node.input]
        assert set(sources) <= names
        tower = node.name.split("/")[0]
        if tower.startswith("tower_"):
            assert not [s for s in sources if s.startswith("tower_") and s.split("/")[0] != tower]
