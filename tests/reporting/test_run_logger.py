import json
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import CIFAR10, Dataset, DatasetInfo, Split
from cifar_towers.evaluation.score import Evaluation, Score
from cifar_towers.multi_worker.cluster_spec import ALONE
from cifar_towers.reporting import figures, run_logger
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.run_logger import Callbacks, RunLogger, memory_usage
from cifar_towers.towers import Tower
from tests.runs.short_runs import draw_nothing, events_of, tensors_of

ROOT = Path(__file__).parents[2]


def logger_of(directory, num_classes=3, num_images=50, profile_steps=""):
    """Return the logger of a run of one step, and its test set."""
    names = tuple(f"class {index}" for index in range(num_classes))
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 256, (num_images, 8, 8, 3), np.uint8), np.arange(num_images) % num_classes)
    config = SimpleNamespace(
        **{"directory": directory, "batch_size": 500, "name": "small", "seed": 0, "model": "net"},
        **{
            "micro_batches": 1,
            "strategy": "towers",
            "hard_example_pool": 0,
            "tta": 0,
            "learning_rate_schedule": "linear:0=1",
            "epochs": 1,
            "max_steps": 1,
        },
        profile_steps=profile_steps,
    )
    setup = SimpleNamespace(
        config=config,
        dataset=SimpleNamespace(name="mine", train=split, info=DatasetInfo(names)),
        banner="",
        precision="float32",
        workers=ALONE,
        length=RunLength(1, 1, 1),
        timer=PhaseTimer(),
        local_towers=[Tower(0, "/CPU:0")],
        step_towers=[Tower(0, "/CPU:0")],
    )
    model = keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization()])
    return RunLogger(setup, model, Callbacks()), split


def evaluate(split, num_classes, *kinds):
    """Return evaluations of a net that is wrong about every 7th image; one per kind (weights, tta)."""
    logits = 3.0 * np.eye(num_classes)[(split.labels + (np.arange(len(split.labels)) % 7 == 0)) % num_classes]
    return [Evaluation("test", weights, tta, Score(split.labels, logits)) for weights, tta in kinds]


def test_start_has_no_plural_of_one_step_and_tells_parameters_apart(tmp_path, capsys):
    """The batch normalization of two channels trains scale and offset, and moves mean and variance."""
    logger_of(tmp_path)[0].log_start()
    text = capsys.readouterr().out
    assert "50 training images; 1 step of 500, 1 per epoch" in text and "8 parameters (4 trainable)" in text


def test_evaluation_leaves_pictures_of_the_score_that_the_run_reports(tmp_path, monkeypatch):
    """Mistakes name the index of the image, and the confusion matrix is a file as well."""
    shown, draw = {}, figures.image_grid
    monkeypatch.setattr(
        figures, "image_grid", lambda *arguments: (shown.update(arguments=arguments), draw(*arguments))[1]
    )
    logger, split = logger_of(tmp_path)
    evaluations = evaluate(split, 3, ("raw", 0), ("ema", 0), ("ema", 2))[::-1]
    records = logger.log_evaluation(1, evaluations, {"test": split}, final=True)
    assert [(record["weights"], record["tta"]) for record in records] == [("ema", 2), ("ema", 0), ("raw", 0)]
    images, captions, title = shown["arguments"]
    assert "test/ema_tta2" in title and len(captions) == 8
    indices = [int(caption.rpartition("\nimage ")[2]) for caption in captions]
    assert sorted(indices) == list(range(0, 50, 7)) and (images == split.images[indices]).all()
    for name in ("mistakes.png", "confusion.png"):
        assert min(Image.open(tmp_path / name).size) > 100
    tags = events_of(tmp_path / "eval").Tags()["tensors"]
    assert {"mistakes/test", "confusion/test", "accuracy/test/ema_tta2"} <= set(tags)
    assert {f"{kind}/test/{weights}" for kind in ("loss", "ece") for weights in ("raw", "ema", "ema_tta2")} <= set(tags)


@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_drawings_of_evaluations_are_limited_to_a_share_of_the_time(tmp_path, monkeypatch, share):
    monkeypatch.setattr(run_logger, "DRAWING_SHARE", share)
    monkeypatch.setattr(figures, "confusion_matrix", draw_nothing)
    logger, split = logger_of(tmp_path)
    for step in (2, 4, 6, 8):
        logger.log_evaluation(step, evaluate(split, 3, ("raw", 0)), {"test": split}, final=step == 8)
    evaluated = events_of(tmp_path / "eval")
    assert list(tensors_of(evaluated, "accuracy/test/raw")) == [2, 4, 6, 8]
    assert list(tensors_of(evaluated, "mistakes/test")) == ([2, 4, 6, 8] if share > 1 else [2, 8])


def test_thousand_classes_have_mistakes_but_no_confusion_matrix(tmp_path):
    logger, split = logger_of(tmp_path, 1000, 2000)
    logger.log_evaluation(1, evaluate(split, 1000, ("raw", 0)), {"test": split}, final=True)
    tags = events_of(tmp_path / "eval").Tags()["tensors"]
    assert set(tags) == {"accuracy/test/raw", "loss/test/raw", "ece/test/raw", "mistakes/test"}
    assert (tmp_path / "mistakes.png").exists() and not (tmp_path / "confusion.png").exists()


def test_result_ends_with_the_score_that_the_run_reports(tmp_path, capsys):
    logger, split = logger_of(tmp_path)
    records = logger.log_evaluation(1, evaluate(split, 3, ("ema", 2), ("raw", 2)), {"test": split}, final=False)
    records[1]["accuracy"] = 1.0
    seconds, images_per_sec = {"train": 75.0, "evaluate": 25.0}, 100.0
    result = {"step": 1, "seconds": seconds, "images_per_sec": images_per_sec, "weights_sha256": "ab" * 32}
    logger.log_result(result | {"evaluations": records})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "result: test 84.00 % (ema weights, TTA 2, 50 images)"
    assert "test 100.00 % (raw weights, TTA 2, 50 images)" in lines
    assert "step 1 after 0:01:40: train 75 s, evaluate 25 s" in lines


@pytest.mark.parametrize(
    ("program", "command"),
    [("cifar_towers/__main__.py", "cifar-towers"), ("bin/cifar-towers", "bin/cifar-towers")],
)
def test_command_can_be_typed_again(monkeypatch, program, command):
    monkeypatch.setattr("sys.argv", [program, "--seed=3"])
    assert run_logger.describe_machine()["command"] == [command, "--seed=3"]


def test_installed_copy_ignores_the_repository_around_it(monkeypatch):
    assert run_logger._git_revision() != "unknown" or not (ROOT / ".git").exists()
    monkeypatch.setattr(run_logger, "__file__", str(ROOT / "tests" / "a" / "b" / "run_logger.py"))
    assert run_logger._git_revision() == "unknown"


def blank_split(number):
    return Split(np.zeros((number, 4, 4, 3), np.uint8), np.zeros(number, np.int64), CIFAR10)


def test_environment_of_a_run():
    some = blank_split(2)
    setup = SimpleNamespace(dataset=Dataset("mine", some, blank_split(0), some), banner="FAKE", precision="float32")
    setup.step_towers = [Tower(0, "/CPU:0")]
    content = run_logger.describe_run(setup)
    assert content["packages"]["tensorflow"].startswith("2.") and content["processor"]
    assert content["towers"] == [{"name": "tower_0", "device": "/CPU:0"}] and content["synthetic_data"] == "FAKE"
    assert content["data_sha256"] == {"train": some.digest, "test": some.digest} and len(content["class_names"]) == 10
    json.dumps(content)


def test_memory_of_host_and_gpus(monkeypatch):
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda gpu: {"current": 5e9, "peak": 6e9})
    values = memory_usage([Tower(0, "/CPU:0"), Tower(1, "/GPU:0")])
    assert values.pop("memory/host_mb") > 100 and values == {"memory/GPU:0_mb": 6000}


def run_steps(logger, steps):
    logger.length = RunLength(1, steps.stop, steps.stop)
    logger.profile(steps.start)
    for step in steps:
        tf.linalg.inv(tf.random.uniform([3, 3]))
        logger.profile(step + 1)
    logger.close()


@pytest.mark.parametrize(("steps", "num_traces"), [(range(8), 1), (range(4), 1), (range(2), 0), (range(3, 8), 0)])
def test_trace_of_the_steps_that_are_profiled(tmp_path, steps, num_traces):
    run_steps(logger_of(tmp_path, profile_steps="2:5")[0], steps)
    traces = list(tmp_path.glob("train/plugins/profile/*/*.xplane.pb"))
    assert len(traces) == num_traces and all(b"MatrixInverse" in trace.read_bytes() for trace in traces)


def test_profile_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "train").write_text("in the way")
    run_steps(logger_of(tmp_path, profile_steps="0:2")[0], range(4))
    assert len(caplog.records) == 1 and "training continues without it" in caplog.text
    (tmp_path / "train").unlink()
    run_steps(logger_of(tmp_path, profile_steps="0:2")[0], range(4))  # the profiler is free
    assert list(tmp_path.glob("train/plugins/profile/*/*.xplane.pb"))
