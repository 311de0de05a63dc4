"""A step and runs on whatever devices the towers have: logical CPU devices here, GPUs under `make
test-gpu`.
"""

import itertools
import json
import subprocess

import pytest
from tensorflow.python.eager import context

from cifar_towers.config import TrainConfig
from cifar_towers.towers.placement import HOST, short_device
from tests.helpers.programs import COMMAND
from tests.helpers.step_runs import StepRun

pytestmark = pytest.mark.gpu
ASSIGNMENTS = ("AssignVariableOp", "AssignSubVariableOp", "AssignAddVariableOp")


def partitions(step, num_towers):
    """Device -> operations, named by their kernels, of the graphs that a step is cut into when it
    first runs.
    """
    context.context().enable_graph_collection()
    context.context().export_run_metadata()  # forgets what ran before
    try:
        step()
        collected = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    devices = {}
    for function in collected.function_graphs:
        nodes = list(
            itertools.chain.from_iterable(graph.node for graph in function.partition_graphs)
        )
        names = "".join(node.name for node in nodes)
        if f"tower_{num_towers - 1}/" in names and f"tower_{num_towers}/" not in names:
            for node in nodes:
                devices.setdefault(short_device(node.device), []).append(node)
    return devices


@pytest.mark.parametrize("policy", ["round_robin", pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_step_ran_where_the_policy_says(towers, examples, policy):
    """Read from the graphs that ran: each tower's convolutions on its device, each update beside
    its variable.
    """
    on_towers = towers(4)
    settings = {"model": "speednet93", "batch_size": 8}
    run = StepRun(on_towers, examples, TrainConfig(variable_placement=policy, **settings))
    devices = partitions(lambda: run.step(0), 4)
    work = {}
    assigned = set()
    for device, nodes in devices.items():
        operations = [node.op for node in nodes]
        work[device] = sum("Conv2D" in operation for operation in operations)
        if set(ASSIGNMENTS).intersection(operations):
            assigned.add(device)
    computing = {device for device, count in work.items() if count}

    assert computing == {tower.device for tower in on_towers}
    assert len({work[tower.device] for tower in on_towers}) == 1  # the same for each

    updated = {short_device(variable.device) for variable in run.state.weights}
    statistics = {short_device(variable.device) for variable in run.state.non_trainable}

    assert assigned | {HOST} == updated | statistics | {HOST}  # the step counter is on the host
    if policy == "cpu":
        assert updated == {HOST}
    else:
        assert len(updated) > 1


@pytest.mark.slow
def test_a_deterministic_run_in_two_parts_has_the_same_bits(tmp_path, small_folder):
    flags = ["--model=cifarnet", "--crop=24", "--batch_size=40", "--deterministic"]
    flags += [f"--dataset={small_folder}", "--num_gpus=2", "--eval_every_epochs=0"]
    for name, steps in (("whole", 20), ("parts", 10), ("parts", 20)):
        place = f"--train_dir={tmp_path / name}"
        command = [*COMMAND, "train", *flags, f"--max_steps={steps}", place]
        subprocess.run(command, check=True)

    whole = json.loads((tmp_path / "whole/result.json").read_text())
    parts = json.loads((tmp_path / "parts/result.json").read_text())
    assert whole["weights_sha256"] == parts["weights_sha256"]
