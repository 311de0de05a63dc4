import json
from pathlib import Path
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Dataset, DatasetInfo, Split
from cifar_towers.evaluation.score import Evaluation, Score
from cifar_towers.multi_worker.cluster_spec import ALONE
from cifar_towers.reporting import figures, run_logger
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.run_logger import RunLogger, memory_usage
from cifar_towers.towers import Tower
from cifar_towers.training.setup import RunSetup
from tests.helpers.configs import recipe
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import events_of

ROOT = Path(__file__).parents[2]
TOWERS = [Tower(0, "/CPU:0")]


def logger_of(directory, num_classes=3, num_images=50, steps=1, **settings):
    """Return the logger of a run, and its test set."""
    info = DatasetInfo(tuple(f"class {index}" for index in range(num_classes)))
    images = np.random.default_rng(0).integers(0, 256, (num_images, 8, 8, 3), np.uint8)
    split = Split(images, np.arange(num_images) % num_classes, info)
    setup = RunSetup(
        config=recipe("smoke", train_dir=str(directory), **settings),
        dataset=Dataset("mine", split, split.take(slice(0)), split),
        strategy=None,
        towers=TOWERS,
        local_towers=TOWERS,
        precision="float32",
        workers=ALONE,
        length=RunLength(1, steps, steps),
    )
    return RunLogger(setup, directory, keras.Sequential([keras.Input([2])]), PhaseTimer()), split


def evaluate(split, *tta):
    """Return evaluations of a net that is wrong about every 7th image; one for each `tta`."""
    classes = len(split.info.class_names)
    is_wrong = np.arange(len(split.labels)) % 7 == 0
    predicted = np.where(is_wrong, split.labels + 1, split.labels) % classes
    logits = 3.0 * np.eye(classes)[predicted]
    return [Evaluation("test", "ema", with_tta, Score(split.labels, logits)) for with_tta in tta]


def test_an_evaluation_leaves_pictures_of_the_score_that_the_run_reports(tmp_path, monkeypatch):
    """Mistakes name the index of the image, and the confusion matrix is a file as well."""
    draw = Mock(wraps=figures.image_grid)
    monkeypatch.setattr(figures, "image_grid", draw)
    logger, split = logger_of(tmp_path)
    evaluations = evaluate(split, True, False)
    records = logger.log_evaluation(1, evaluations, {"test": split}, final=True)

    assert [record["tta"] for record in records] == [True, False]

    images, captions, title = draw.call_args.args
    indices = [int(caption.rpartition("\nimage ")[2]) for caption in captions]

    assert "test_tta" in title
    assert sorted(indices) == list(range(0, 50, 7))
    assert (images == split.images[indices]).all()

    for name in ("mistakes.png", "confusion.png"):
        assert min(Image.open(tmp_path / name).size) > 100
    tags = {"mistakes/test", "confusion/test"}
    for score in ("test", "test_tta"):
        tags |= {f"accuracy/{score}", f"loss/{score}", f"ece/{score}"}

    assert set(events_of(tmp_path / "eval").Tags()["tensors"]) == tags


def test_31_classes_have_mistakes_but_no_confusion_matrix(tmp_path):
    logger, split = logger_of(tmp_path, 31, 62)
    evaluations = evaluate(split, False)
    (record,) = logger.log_evaluation(1, evaluations, {"test": split}, final=True)
    assert "confusion" not in record
    assert (tmp_path / "mistakes.png").exists()
    assert not (tmp_path / "confusion.png").exists()


def test_the_result_ends_with_the_score_that_the_run_reports(tmp_path, capsys):
    logger, split = logger_of(tmp_path)
    evaluations = evaluate(split, True, False)
    records = logger.log_evaluation(1, evaluations, {"test": split}, final=False)
    records[1]["accuracy"] = 1.0
    result = {
        "step": 1,
        "seconds": {"train": 75.0},
        "images_per_sec": 100.0,
        "weights_sha256": 32 * "ab",
    }
    logger.log_result(result | {"evaluations": records})
    output = capsys.readouterr().out
    last = output.splitlines()[-1]

    assert lines_with(last, "result: mine test", "84.00 %", "ema", "with TTA", "50 ")
    assert lines_with(output, "100.00 %", "without TTA")
    assert lines_with(output, "0:01:15")


def test_an_installed_copy_ignores_the_repository_around_it(monkeypatch):
    revision = run_logger.describe_machine()["git_revision"]
    assert revision != "unknown" or not (ROOT / ".git").exists()

    monkeypatch.setattr(run_logger, "__file__", str(ROOT / "tests" / "a" / "b" / "run_logger.py"))
    machine = run_logger.describe_machine()
    assert machine["git_revision"] == "unknown"
    assert json.dumps(machine)


def test_memory_of_host_and_gpus(monkeypatch):
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda gpu: {"current": 5e9, "peak": 6e9}
    )
    values = memory_usage([*TOWERS, Tower(1, "/GPU:0")])
    assert values.pop("memory/host_mb") > 100
    assert values == {"memory/GPU:0_mb": 6000}


def profile(directory, steps, profile_steps="2:5"):
    """Return the traces of a run from one step to another, which inverts matrices."""
    logger, _ = logger_of(directory, steps=steps.stop, profile_steps=profile_steps)
    logger.profile(steps.start)
    for step in steps:
        tf.linalg.inv(tf.random.uniform([3, 3]))
        logger.profile(step + 1)
    logger.close()
    return [path.read_bytes() for path in directory.glob("train/plugins/profile/*/*.xplane.pb")]


@pytest.mark.parametrize(
    ("steps", "num_traces"), [(range(8), 1), (range(4), 1), (range(2), 0), (range(3, 8), 0)]
)
def test_trace_of_the_steps_that_are_profiled(tmp_path, steps, num_traces):
    traces = profile(tmp_path, steps)
    assert len(traces) == num_traces
    assert all(b"MatrixInverse" in trace for trace in traces)


def test_a_profile_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "train").write_text("in the way")
    assert not profile(tmp_path, range(4), "0:2")
    assert len(caplog.records) == 1
    (tmp_path / "train").unlink()
    assert profile(tmp_path, range(4), "0:2")  # the profiler is free


def test_steps_of_a_profile_run_as_always(tmp_path):
    """The trace waits before it begins and ends, not within."""
    logger, _ = logger_of(tmp_path, profile_steps="2:5")
    assert [step for step in range(9) if logger.is_profile_bound(step)] == [2, 5]


def test_a_result_stays_until_the_run_goes_on(tmp_path):
    """A run that is evaluated again after its last step, as on a cluster, has its result."""
    logger, _ = logger_of(tmp_path, steps=3)
    result = tmp_path / "result.json"
    for step, stays in ((3, True), (2, False)):
        result.write_text("{}")
        logger.open(step, [])
        logger.close()
        assert result.exists() == stays
