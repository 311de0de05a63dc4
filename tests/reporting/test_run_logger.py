from types import SimpleNamespace

import keras
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.evaluation.score import Evaluation, Score
from cifar_towers.reporting import figures, run_logger
from cifar_towers.reporting.callbacks import Callbacks
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.run_logger import NoiseScale, RunLogger, signal_and_noise
from cifar_towers.reporting.run_records import read_times
from cifar_towers.towers import Tower


def logger_of(directory, num_classes=3, num_images=50):
    """Return the logger of a run of one step, and its test set."""
    names = tuple(f"class {index}" for index in range(num_classes))
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 256, (num_images, 8, 8, 3), np.uint8), np.arange(num_images) % num_classes)
    config = SimpleNamespace(
        directory=directory, batch_size=500, name="small", seed=0, model="net", hard_example_pool=0, tta=0
    )
    info = SimpleNamespace(
        config=config,
        dataset=SimpleNamespace(name="mine", train=split, info=DatasetInfo(names)),
        banner="",
        local_towers=[Tower(0, "/CPU:0")],
        precision="float32",
        length=RunLength(1, 1, 1),
        model=keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization()]),
        describe_parallelism=lambda: "1 tower",
    )
    return RunLogger(info, PhaseTimer(), Callbacks()), split


def evaluate(split, num_classes, *kinds):
    """Return evaluations of a net that is wrong about every 7th image; one per kind (weights, tta)."""
    logits = 3.0 * np.eye(num_classes)[(split.labels + (np.arange(len(split.labels)) % 7 == 0)) % num_classes]
    return [Evaluation("test", weights, tta, Score(split.labels, logits)) for weights, tta in kinds]


def test_start_has_no_plural_of_one_step_and_tells_parameters_apart(tmp_path, capsys):
    """The batch normalization of two channels trains scale and offset, and moves mean and variance."""
    logger_of(tmp_path)[0].log_start()
    text = capsys.readouterr().out
    assert "50 training images; 1 step of 500, 1 per epoch" in text and "8 parameters (4 trainable)" in text


def test_times_are_written_in_place_every_second(tmp_path, monkeypatch):
    """A shorter content leaves nothing of a longer one. What is damaged counts as absent, and is replaced."""
    clock = [100.0]
    monkeypatch.setattr(run_logger.time, "monotonic", lambda: clock[0])
    logger, _ = logger_of(tmp_path)
    path = tmp_path / "times.json"
    for seconds, expected in ((123.456, 123.456), (7.0, 123.456), (8.0, 8.0)):
        logger.timer.seconds["train"] = seconds
        logger.write_times()
        assert read_times(tmp_path) == logger.timer.metadata() | {"seconds": {"train": expected}}
        clock[0] += 0.75
    whole = path.read_text()
    for damaged in ("", whole[:20], whole[20:], "[]\n", "\0" * 1001):
        path.write_text(damaged)
        assert read_times(tmp_path) == {}
        clock[0] += 1
        logger.write_times()
        assert path.read_text()[: len(whole)] == whole and read_times(tmp_path)["seconds"] == {"train": 8.0}


def test_times_that_cannot_be_written_are_named_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_logger, "TIMES_SECONDS", 0)
    (tmp_path / "times.json").mkdir()
    logger, _ = logger_of(tmp_path)
    for _ in range(3):
        logger.write_times()
    assert caplog.text.count("times.json cannot be written") == 1 and read_times(tmp_path) == {}


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
    tags = EventAccumulator(str(tmp_path / "eval")).Reload().Tags()["tensors"]
    assert {"mistakes/test", "confusion/test", "accuracy/test/ema_tta2", "class_accuracy/test/class 1"} <= set(tags)
    assert {f"{kind}/test/{weights}" for kind in ("loss", "ece") for weights in ("raw", "ema", "ema_tta2")} <= set(tags)


def test_thousand_classes_have_accuracies_but_no_confusion_matrix(tmp_path):
    logger, split = logger_of(tmp_path, 1000, 2000)
    logger.log_evaluation(1, evaluate(split, 1000, ("raw", 0)), {"test": split}, final=True)
    tags = EventAccumulator(str(tmp_path / "eval")).Reload().Tags()["tensors"]
    scores = ["accuracy/test/raw", "loss/test/raw", "ece/test/raw", "mistakes/test"]
    assert sorted(tags) == sorted(scores + [f"class_accuracy/test/class {index}" for index in range(1000)])
    assert (tmp_path / "mistakes.png").exists() and not (tmp_path / "confusion.png").exists()


def test_result_ends_with_the_score_that_the_run_reports(tmp_path, capsys):
    logger, split = logger_of(tmp_path)
    records = logger.log_evaluation(1, evaluate(split, 3, ("ema", 2), ("raw", 2)), {"test": split}, final=False)
    records[1]["accuracy"] = 1.0
    seconds, images_per_sec = {"train": 75.0, "lost": 15.0, "not_running": 10.0}, 100.0
    result = {"step": 1, "seconds": seconds, "images_per_sec": images_per_sec, "weights_sha256": "ab" * 32}
    logger.log_result(result | {"evaluations": records, "lost_steps": 1, "goodput": 0.75})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "result: test 84.00 % (ema weights, TTA 2, 50 images)"
    assert "test 100.00 % (raw weights, TTA 2, 50 images)" in lines
    assert "step 1 after 1:40: train 75 s, lost 15 s, not running 10 s; 1 step lost, goodput 75.0 %" in lines


def test_noise_scale_of_known_noise():
    """Gradients of examples = true gradient + noise of covariance with trace 50 x 4: noise scale 200 / 25 = 8."""
    random, dimension, batch, towers = np.random.default_rng(1), 50, 64, 4
    true = np.full(dimension, 25**0.5 / dimension**0.5)
    estimates = []
    for _ in range(4000):
        each = true + random.normal(scale=2, size=(towers, dimension)) / (batch / towers) ** 0.5
        norms = np.linalg.norm(each, axis=1)
        estimates.append(signal_and_noise(norms, np.linalg.norm(each.mean(0)), batch))
    signal, trace = np.mean(estimates, 0)
    assert signal == pytest.approx(25, rel=0.02) and trace == pytest.approx(200, rel=0.02)


def test_run_resumes_after_a_norm_that_overflowed(tmp_path):
    """Such a number is null in metrics.jsonl."""
    logger, _ = logger_of(tmp_path)
    for norm in (1.0, np.inf):
        logger.metrics.write(
            kind="train", step=1, gradient_norm=0.9, gradient_noise_scale=2.0, towers={"gradient_norm": [norm, 1.0]}
        )
    logger.truncate_after(1)
    assert logger._noise_scale.update([1.0, 1.0], 0.9) == pytest.approx(NoiseScale(500).update([1.0, 1.0], 0.9))
