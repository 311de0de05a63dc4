"""Real workers on the loopback: they train as towers do, and read and write the same
checkpoints.
"""

import functools
import json
import re
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from cifar_towers.multi_worker.launcher import free_addresses
from cifar_towers.runs.checkpoint import find_checkpoint, read_checkpoint, step_of
from tests.helpers import programs
from tests.helpers.configs import net
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import run

start = functools.partial(programs.start, stderr=subprocess.STDOUT)


@pytest.fixture
def shared(small_folder):
    """Return the flags of all runs here."""
    flags = "--batch_size=24 --precision=float32 --epochs=1000 --eval_every_epochs=0"
    return [f"--dataset={small_folder}", *flags.split()]


@pytest.fixture
def flags(shared):
    """Return the flags of a small model with dropout, batch normalization and a moving average."""
    model = net("without_weight_loss")
    return [
        *shared,
        f"--model={model}",
        "--ema_decay=0.5",
        "--max_steps=4",
        "--summary_every_steps=2",
    ]


def run_all(train_dir, *flags, workers=0):
    """Run a training that must succeed, in so many processes or in one."""
    if workers:
        program = ["launch", f"--num_workers={workers}", "--max_restarts=0", "--"]
    else:
        program = ["train"]
    process = start(*program, *flags, f"--train_dir={train_dir}")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.fixture
def start_worker(flags, tmp_path):
    """Return a function that starts one of two workers, named by TF_CONFIG, which train in tmp_path
    / "run".
    """
    addresses = free_addresses(2)

    def start_one(index, *more, addresses=addresses):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        place = f"--train_dir={tmp_path / 'run'}"
        return start(
            "train", *flags, "--strategy=multi_worker", place, *more, TF_CONFIG=json.dumps(cluster)
        )

    start_one.addresses = addresses
    return start_one


def port_of(address):
    return int(address.rpartition(":")[2])


def wait_for(path, process):
    """Wait until a process has created a file."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate(timeout=1)[0]
        assert time.monotonic() < deadline, process.communicate(timeout=1)[0]
        time.sleep(0.02)


def read_records(train_dir):
    lines = (train_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(train_dir):
    return files.read_json(train_dir / "result.json")["weights_sha256"]


def assert_same_variables(one, other, rtol=0.0, atol=0.0, ignored=()):
    """Compare all variables in the last checkpoints of two runs."""
    values, _ = read_checkpoint(find_checkpoint(one))
    expected, _ = read_checkpoint(find_checkpoint(other))

    assert values.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith(ignored):
            np.testing.assert_allclose(values[name], value, rtol, atol, err_msg=name)


def test_two_workers_train_as_two_towers(flags, tmp_path):
    """To rounding, as the towers here share the cores differently; bits are compared below."""
    run_all(tmp_path / "workers", *flags, workers=2)
    flags = [*flags, "--num_gpus=2", f"--train_dir={tmp_path / 'towers'}"]
    run(parse_command_line(TrainConfig, flags))

    assert_same_variables(tmp_path / "workers", tmp_path / "towers", rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_workers_have_the_same_bits_as_two_towers(flags, tmp_path):
    run_all(tmp_path / "workers", *flags, workers=2)
    run_all(tmp_path / "towers", *flags, "--num_gpus=2")

    assert weights(tmp_path / "workers") == weights(tmp_path / "towers")
    assert_same_variables(tmp_path / "workers", tmp_path / "towers")

    ours = files.read_json(tmp_path / "workers/result.json")["evaluations"]
    others = files.read_json(tmp_path / "towers/result.json")["evaluations"]
    for one, other in zip(ours, others, strict=True):
        assert one.pop("loss") == pytest.approx(other.pop("loss"))
        assert one == other
        assert one["count"] == 40

    ours = read_records(tmp_path / "workers")
    others = read_records(tmp_path / "towers")
    for one, other in zip(ours, others, strict=True):
        for name in ("kind", "step", "accuracy", "count", "confusion"):
            assert one.get(name) == other.get(name)
        for name, numbers in other.get("towers", {}).items():  # the last tower is worker 1's
            assert one["towers"][name] == pytest.approx(numbers)


@pytest.mark.slow
def test_checkpoint_moves_from_workers_to_towers_and_back(shared, tmp_path):
    """Without batch normalization the number of workers makes no difference but rounding."""
    changing = tmp_path / "changing"
    straight = tmp_path / "straight"
    flags = [*shared, f"--model={net('regularized')}", "--ema_decay=0.5", "--learning_rate=0.01"]
    run_all(changing, *flags, "--max_steps=4", workers=3)
    run_all(changing, *flags, "--max_steps=8", "--num_gpus=2")
    run_all(changing, *flags, "--max_steps=12", workers=2)
    run_all(straight, *flags, "--max_steps=12", "--num_gpus=1")

    assert find_checkpoint(changing).name == "step-12.npz"
    # the average loss is the final tower's, whose shard differs
    assert_same_variables(changing, straight, rtol=1e-4, atol=1e-6, ignored="loss_average")


LOST = r"lost: worker {} of 2 \({}\) "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "codes", "lines"),  # started: (index, seed, which of three addresses are given)
    [
        ([(0, 0, (0, 1))], [5], [LOST.format(1, "{1}")]),
        ([(1, 0, (0, 1))], [5], [LOST.format(0, "{0}")]),
        ([(0, 0, (0, 1)), (1, 0, (0, 2))], [5, 5], [LOST.format("[01]", r"\S+")] * 2),
        ([(0, 0, (0, 1)), (1, 1, (0, 1))], [2, 2], ["seed is 1 on worker 1 .* 0 on worker 0"] * 2),
    ],
    ids=["no worker 1", "no chief", "different lists", "different seeds"],
)
def test_bad_cluster_ends_every_worker_with_a_line_that_names_it(
    start_worker, started, codes, lines
):
    addresses = [*start_worker.addresses, *free_addresses(1)]
    processes = []
    for index, seed, places in started:
        known = [addresses[place] for place in places]
        processes.append(start_worker(index, f"--seed={seed}", addresses=known))
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]

    assert [process.returncode for process in processes] == codes, outputs

    for output, line in zip(outputs, lines, strict=True):
        assert re.search(line.format(*addresses), output.splitlines()[-1]), output
        assert "Traceback" not in output, output


def listening_ports(pid):
    connections = [one for one in psutil.net_connections("tcp") if one.pid == pid]
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_workers_open_one_port_each_and_a_signal_to_one_saves_and_ends_all(start_worker, tmp_path):
    workers = [
        start_worker(index, "--max_steps=4000", "--checkpoint_every_steps=10") for index in range(2)
    ]
    wait_for(tmp_path / "run" / "step-10.npz", workers[0])
    ports = [listening_ports(worker.pid) for worker in workers]
    workers[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[0] for process in workers]

    assert ports == [{port_of(address)} for address in start_worker.addresses]
    assert [process.returncode for process in workers] == [143, 143], outputs

    saved = step_of(find_checkpoint(tmp_path / "run"))
    assert all(f"step {saved}:" in output.strip().splitlines()[-1] for output in outputs), outputs


@pytest.mark.slow
def test_lost_worker_is_named_and_all_are_restarted(flags, tmp_path):
    flags = [
        *flags,
        "--max_steps=300",
        "--checkpoint_every_steps=10",
        f"--train_dir={tmp_path / 'run'}",
    ]
    launcher = start("launch", "--num_workers=2", "--max_restarts=1", "--", *flags)
    wait_for(tmp_path / "run" / "step-10.npz", launcher)
    psutil.Process(launcher.pid).children()[1].kill()
    output, _ = launcher.communicate(timeout=300)

    assert launcher.returncode == 0, output
    assert lines_with(output, "worker 1 of 2")
    assert lines_with(output, "restart 1 ", " 1")
    assert "resuming" in output
