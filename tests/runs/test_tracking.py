"""docs/tracking.md: its table of metrics, and its callbacks with the real trackers (`make test-trackers`)."""

import ast
import inspect
import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cifar_towers import load_run
from cifar_towers.cli.main import start_training
from cifar_towers.evaluation.score import Score
from cifar_towers.reporting.run_logger import CallbackError, Callbacks, RunLogger, evaluation_record
from cifar_towers.shutdown import ShutdownHandler
from tests.configs import TINY_NET
from tests.runs.short_runs import STEPS, TINY, records_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tracking.md").read_text()
*TRACKERS, EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
TRACKERS = {re.match(r"import (\w+)", code)[1]: code for code in TRACKERS}


def documented_keys(title):
    """Return {key: name in a callback} of a table; an empty name if callbacks do not get it."""
    lines = PAGE.split(f"### {title}\n")[1].split("###")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines if line.startswith("| `")]
    return {key: name for _, key, name, *_ in rows}


TRAINING, EVALUATION = documented_keys("Training records"), documented_keys("Evaluation records")


def keys_in(record):
    nested = {f"towers.{name}" for name in record.get("towers", {})}
    return (record.keys() - {"towers"}) | nested


def literal_keys(function):
    """Return the keys that a function's source gives to dictionaries and to records that it writes."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    keys = {key for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    keys |= {node.slice for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.metrics.write"]
    written = {keyword.arg for call in calls for keyword in call.keywords} - {None}
    return written | {key.value for key in keys if isinstance(key, ast.Constant)}


EVALUATION_KEYS = literal_keys(evaluation_record) | literal_keys(Score.record)


def test_every_key_of_the_records_is_documented_and_no_other(tiny_run):
    train, evaluations = records_of(tiny_run[0], "train"), records_of(tiny_run[0], "eval")
    assert set().union(*map(keys_in, train)) == TRAINING.keys()
    assert set().union(*map(keys_in, evaluations)) == EVALUATION.keys()
    source = inspect.getsource(sys.modules[RunLogger.__module__])
    assert source.count("metrics.write(") == source.count("self.metrics.write(kind=") == 2
    written = literal_keys(RunLogger.log_step) | literal_keys(RunLogger._tower_agreement)
    assert written == {key.removeprefix("towers.") for key in TRAINING} | {"towers"}
    assert literal_keys(RunLogger.log_evaluation) | EVALUATION_KEYS == EVALUATION.keys()


def test_callbacks_get_the_documented_names(tiny_run):
    steps = []
    *_, record = records_of(tiny_run[0], "train")
    Callbacks([lambda step, metrics: steps.append(metrics)]).step(record["step"], record)
    names = {name for name in TRAINING.values() if name}
    assert steps[0].keys() == names | {name.replace("tower_0", "tower_1") for name in names}
    assert steps[0]["tower_1/cosine"] == record["towers"]["cosine"][1]
    assert {name for name in EVALUATION.values() if name} == EVALUATION_KEYS


class TrackedRun(NamedTuple):
    """A run as its tracker has it."""

    ended: Any  # exit code of W&B, status of MLflow
    config: dict
    values: dict  # (step, name) -> value, except the name `step`


def read_wandb(place, name):
    """Read W&B's offline files: blocks of 32 KiB with records (checksum, length, kind), kinds 1 and 4 end a message."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # wait until its files are written; the next test's are then in that test's directory

    def messages(data):
        position, message = 7, b""
        while len(data) - position > 7:
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            message += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                yield Record.FromString(message)
                message = b""

    for path in sorted(place.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        found = list(messages(path.read_bytes()))
        (started,) = (record.run for record in found if record.HasField("run"))
        if started.display_name != name:
            continue
        config = {item.key: json.loads(item.value_json) for item in started.config.update if item.key[0] != "_"}
        values = {}
        for record in found:
            row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            values |= {(row["step"], key): value for key, value in row.items() if key[0] != "_" and key != "step"}
        (exit_code,) = (record.exit.exit_code for record in found if record.HasField("exit"))
        yield TrackedRun(exit_code, config, values)


def read_mlflow(place, name):
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in client.search_runs(ids, f"attributes.run_name = '{name}'", order_by=["attributes.start_time"]):
        histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics if key != "step"]
        values = {(point.step, point.key): point.value for history in histories for point in history}
        assert run.info.end_time
        yield TrackedRun(run.info.status, run.data.params, values)


def read_trackio(place, name):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    for run in trackio.Api().runs("cifar"):
        if run.name == name:
            logs = SQLiteStorage.get_logs("cifar", run_id=run.id)
            values = {(row["step"], key): row[key] for row in logs for key in row.keys() - {"step", "timestamp"}}
            yield TrackedRun(None, {key: value for key, value in run.config.items() if key[0] != "_"}, values)


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}
ENDED = {"wandb": (0, 1), "mlflow": ("FINISHED", "KILLED"), "trackio": (None, None)}  # of a finished run, and else


def recorded(train_dir, steps):
    """Return the values of metrics.jsonl, as in `TrackedRun`, under the documented names."""
    values = {}
    for record in records_of(train_dir, "train"):
        names = {name: record.get(key) for key, name in TRAINING.items() if name in record and key != "step"}
        for key, towers in record.get("towers", {}).items():
            names |= {f"tower_{tower}/{key}": value for tower, value in enumerate(towers)}
        values |= {(record["step"], name): value for name, value in names.items() if value is not None}
    for record in records_of(train_dir, "eval"):
        for key in ("accuracy", "loss"):
            values[record["step"], f"{record['split']}/{record['weights']}_tta{record['tta']}/{key}"] = record[key]
    return {(step, name): value for (step, name), value in values.items() if step in steps}


@pytest.fixture(scope="module")
def trackio_store(tmp_path_factory):
    """Set what trackio reads when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(params=READERS)
def tracker(request, tmp_path, monkeypatch, trackio_store):
    """Save the page's callback for a tracker as track.py, in the current directory; nothing leaves the machine."""
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DO_NOT_TRACK": "true"}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "track.py").write_text(TRACKERS[request.param])
    return request.param


@pytest.mark.trackers
def test_the_example_logs_settings_and_metrics(tracker, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "track", raising=False)
    exec(EXAMPLE, {})
    run = load_run("runs/tracked")
    (tracked,) = READERS[tracker](tmp_path, "tracked")
    assert tracked.config == ({k: str(v) for k, v in run.config.items()} if tracker == "mlflow" else run.config)
    assert tracked.values == recorded(run.directory, range(run.result["step"] + 1))
    assert {"tower_1/loss", "test/raw_tta2/accuracy"} <= {name for _, name in tracked.values}
    assert tracked.ended == ENDED[tracker][0]


@pytest.mark.trackers
def test_a_run_that_fails_ends_in_the_tracker_and_resumes_as_another(tracker, tmp_path):
    def fail(step, metrics):
        if step == 7:
            raise ValueError("no more")

    place = tmp_path / f"failing-{tracker}"
    config = replace(TINY, num_gpus=2, train_dir=str(place), callback="track.py:Tracker")
    with pytest.raises(CallbackError, match=r"no more; saved step") as caught:
        start_training(config, ShutdownHandler(), callbacks=[fail])
    saved = int(re.search(r"saved step (\d+)", str(caught.value))[1])
    start_training(config, ShutdownHandler())
    failed, resumed = READERS[tracker](tmp_path, place.name)
    assert (resumed.ended, failed.ended) == ENDED[tracker]
    assert failed.values == recorded(place, range(7))
    assert resumed.values == recorded(place, range(saved + 1, STEPS + 1))


@pytest.mark.trackers
def test_an_interrupted_program_ends_the_run_in_the_tracker(tracker, tmp_path, small_folder):
    place = tmp_path / f"interrupted-{tracker}"
    flags = [f"--model={TINY_NET}", f"--dataset={small_folder}", "--batch_size=20", "--epochs=10000", "--num_gpus=2"]
    flags += ["--callback=track.py:Tracker", "--summary_every_steps=10", "--eval_every_epochs=1", "--precision=float32"]
    command = [sys.executable, ROOT / "scripts/train.py", *flags, f"--train_dir={place}"]
    with open("out.txt", "w+") as out:
        training = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        while not (place / "metrics.jsonl").exists() or len(records_of(place, "eval")) < 2:
            assert training.poll() is None, Path("out.txt").read_text()
            time.sleep(0.2)
        os.killpg(training.pid, signal.SIGINT)  # as a terminal does: also to the tracker's own processes
        assert training.wait(60) == 128 + signal.SIGINT, Path("out.txt").read_text()
    saved = int(re.search(r"interrupted: saved step (\d+)", Path("out.txt").read_text())[1])
    (tracked,) = READERS[tracker](tmp_path, place.name)
    assert tracked.ended == ENDED[tracker][1]
    assert tracked.values == recorded(place, range(saved + 1))
