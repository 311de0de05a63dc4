"""The peers' programs, as the race and as a user starts them."""

import subprocess
import sys

import numpy as np
import pytest

from cifar_towers.benchmark import processes, side_by_side
from cifar_towers.data import synthetic
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.errors import RunError

PEERS = {
    "keras_fit.py": ("--model=cifarnet", "--precision=float32"),
    "tutorial_graph.py": ("--model=cifarnet", "--towers=2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "batches.npz"
    batches = Batches(synthetic.make(64, seed=0, stream=0), 16, seed=0)
    side_by_side.write_batches(path, batches, Augmentation(crop=24))
    return path


def command(program, data, *flags, batch_size=16):
    return [
        sys.executable,
        processes.script(f"peers/{program}"),
        f"--data={data}",
        f"--batch_size={batch_size}",
        *flags,
    ]


def test_all_get_the_same_batches(data):
    with np.load(data) as file:
        images, labels, raw = file["images"], file["labels"], file["raw"]
    assert images.shape == (48, 24, 24, 3) and images.dtype == np.float32 and abs(images.mean()) < 1
    assert raw.shape == (48, 32, 32, 3) and raw.dtype == np.uint8 and labels.shape == (48,)


@pytest.mark.parametrize("program", PEERS)
def test_a_peer_makes_as_many_steps_as_it_is_told(data, program):
    with processes.peer(command(program, data, *PEERS[program])) as ask:
        found = [ask(steps) for steps in (3, 1)]
    assert [len(seconds) for seconds in found] == [3, 1]
    assert all(0 < seconds < 60 for seconds in (*found[0], *found[1]))


@pytest.mark.slow
def test_a_peer_by_hand(data):
    told = subprocess.run(
        command("keras_fit.py", data, "--model=cifarnet", "--steps=3"), capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0 and float(told.stdout.removesuffix(" images/s\n")) > 1, told.stderr


@pytest.mark.parametrize(
    ("program", "flags", "told"),
    [
        ("keras_fit.py", ["--model=cifarnet"], "--batch_size=64 is more than the 48 images"),
        ("tutorial_graph.py", ["--model=resnet20"], "the tutorial has one net in one precision"),
    ],
)
def test_what_a_peer_cannot_do_is_one_line(data, program, flags, told):
    with pytest.raises(RunError, match=told), processes.peer(command(program, data, *flags, batch_size=64)):
        pass


def test_without_pytorch_it_says_what_to_install(data):
    """Also where PyTorch is installed: it is hidden from the process."""
    hidden = (
        "import runpy, sys; sys.modules['torch'] = None; program = sys.argv.pop(1);"
        "sys.path.insert(0, program.rsplit('/', 1)[0]); runpy.run_path(program, run_name='__main__')"
    )
    _, *arguments = command("pytorch_step.py", data)
    with (
        pytest.raises(RunError, match="PyTorch is missing; type: pip install"),
        processes.peer([sys.executable, "-c", hidden, *arguments]),
    ):
        pass


def test_a_python_that_is_not_there():
    with pytest.raises(RunError, match="nowhere/python cannot be started"), processes.peer(["nowhere/python"]):
        pass
