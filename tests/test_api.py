"""The package from Python: runs, their records and models, interrupts, and what it leaves as it
was.
"""

import logging
import os
import random
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import cifar_towers
from cifar_towers.config import TrainConfig
from cifar_towers.data import cifar10, synthetic
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from tests.helpers.configs import TINY_NET
from tests.helpers.short_runs import small_runs

SETTINGS = {
    "model": TINY_NET,
    "dataset": "synthetic",
    "shift": 0,
    "batch_size": 50,
    "epochs": 1,
    "learning_rate": 0.1,
    "precision": "float32",
    "num_gpus": 2,
    "summary_every_steps": 10,
    "optimizer": "momentum",
}
OF_RUN = {"model": TINY_NET, "precision": "float32"}


@pytest.fixture(scope="module", autouse=True)
def small_set():
    small = synthetic.make(400, 0, 0), synthetic.make(100, 0, 1)
    with small_runs(*small):
        yield small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cifar_towers.train(train_dir=tmp_path_factory.mktemp("runs") / "one", **SETTINGS)


def test_a_run_has_its_records_and_is_evaluated_and_loaded(run):
    assert [record["step"] for record in run.history] == list(range(1, 9))
    assert run.result["step"] == 8
    assert run.config["batch_size"] == 50
    assert run.evaluations[-1]["split"] == "test"

    score = run.evaluate(**OF_RUN)
    assert run.evaluate(model=TINY_NET) == score
    assert score["precision"] == "float32"
    assert score["count"] == 100
    assert score["accuracy"] == run.result["evaluations"][-1]["accuracy"]

    loaded = cifar_towers.load_run(str(run.directory))
    assert loaded.history == run.history
    assert loaded.result == run.result
    assert run.class_names == [*score["per_class"]]


def test_a_second_training_in_the_process_is_refused(tmp_path):
    """Both would draw from the same random numbers. After the first there can be another."""
    refused = []

    def train_another(step, metrics):
        try:
            cifar_towers.train(train_dir=tmp_path / "second", **SETTINGS)
        except UsageError as error:
            refused.append(str(error))

    settings = SETTINGS | {"max_steps": 2}
    for name in ("first", "third"):
        cifar_towers.train(train_dir=tmp_path / name, callbacks=[train_another], **settings)

    assert len(refused) == 4
    assert "start a second process" in refused[0]
    assert not (tmp_path / "second").exists()


def test_a_run_in_a_relative_directory_keeps_its_records_in_another_directory(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(run.directory.parent)
    loaded = cifar_towers.load_run(run.directory.name)
    monkeypatch.chdir(tmp_path)
    assert loaded.history == run.history
    assert loaded.result == run.result


def test_a_run_that_goes_on_after_its_result_has_none(run, tmp_path):
    continued = cifar_towers.load_run(shutil.copytree(run.directory, tmp_path / "continued"))
    assert continued.result == run.result
    with (continued.directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9}\n')
    assert continued.result is None


def test_arrays_files_folders_the_model_and_its_export_have_the_same_probabilities(
    run, small_set, tmp_path
):
    images = small_set[1].images
    labels = small_set[1].labels
    probabilities = run.predict(images, **OF_RUN)

    assert (probabilities.argmax(1) == labels).mean() == pytest.approx(
        run.result["evaluations"][-1]["accuracy"]
    )

    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, image in zip(paths, images, strict=False):
        Image.fromarray(image).save(path)
    for some, count in ((images[:30], 30), (paths, 3), (tmp_path, 3), (paths[0], 1)):
        np.testing.assert_allclose(run.predict(some, **OF_RUN), probabilities[:count], atol=1e-6)
    of_levels = run.model(model=TINY_NET).predict(images[:30], verbose=0)

    np.testing.assert_allclose(of_levels, probabilities[:30], atol=1e-5)

    run.export(format="keras", out=tmp_path / "exported", check=30, model=TINY_NET)
    exported = keras.models.load_model(tmp_path / "exported" / "model.keras")

    np.testing.assert_allclose(
        exported.predict(images[:30], verbose=0), probabilities[:30], atol=1e-5
    )


def test_reading_a_run_seeds_nothing_and_names_no_layer_anew(run, small_set):
    def draw():
        drawn = np.random.rand(), tf.random.uniform([]), keras.random.uniform([])
        return [float(number) for number in drawn], keras.layers.Dense(1).name

    keras.utils.set_random_seed(7)
    expected = [draw()[0] for _ in range(2)]
    keras.utils.set_random_seed(7)
    first, name = draw()
    run.predict(small_set[1].images[:2], **OF_RUN)
    second, other_name = draw()

    assert [first, second] == expected
    assert name != other_name


def test_a_training_seeds_the_random_numbers_of_the_process(run):
    keras.utils.set_random_seed(7)
    other = random.random()
    numbers = []
    for _ in range(2):
        random.seed()
        build.make_model(TrainConfig(seed=3), "float32", CIFAR10, synthetic.make(20, 0, 0))
        numbers.append(random.random())

    assert numbers[0] == numbers[1] != other


def test_the_settings_of_the_callers_keras_change_nothing_and_are_kept(run, small_set):
    images = small_set[1].images[:30]
    models = []
    caller = {
        "dtype_policy": "mixed_bfloat16",
        "floatx": "float16",
        "image_data_format": "channels_first",
    }
    defaults = {
        "dtype_policy": "float32",
        "floatx": "float32",
        "image_data_format": "channels_last",
    }
    try:
        for settings in (caller, defaults):
            for name, value in settings.items():
                getattr(keras.config, f"set_{name}")(value)
            models.append(run.model(model=TINY_NET))
            run.evaluate(**OF_RUN)
            now = {name: getattr(keras.config, name)() for name in settings}
            assert now | {"dtype_policy": now["dtype_policy"].name} == settings
    finally:
        for name, value in defaults.items():
            getattr(keras.config, f"set_{name}")(value)

    np.testing.assert_array_equal(*(model.predict(images, verbose=0) for model in models))


@pytest.mark.parametrize(
    ("act", "backend", "message"),
    [
        (lambda run: cifar_towers.load_run("nowhere"), "tensorflow", "nowhere"),
        (lambda run: cifar_towers.train(seeds=[0, 1]), "tensorflow", "only with the command"),
        (
            lambda run: cifar_towers.train(strategy="multi_worker"),
            "tensorflow",
            "strategy=multi_worker",
        ),
        (lambda run: run.predict("picture.png"), "jax", "jax.* KERAS_BACKEND=tensorflow"),
    ],
)
def test_what_cannot_be_done_is_refused(run, monkeypatch, act, backend, message):
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(UsageError, match=message):
        act(run)


def test_an_interrupt_saves_and_the_same_call_resumes_to_the_same_bits(run, tmp_path, capsys):
    """The message says that with `overwrite` it would not resume."""
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    started = shutil.copytree(run.directory, tmp_path / "run")
    stopped = cifar_towers.train(
        train_dir=started, overwrite=True, callbacks=[interrupt], **SETTINGS
    )

    assert stopped.result is None
    assert 3 <= stopped.history[-1]["step"] < 8
    assert signal.getsignal(signal.SIGINT) is before
    assert "without --overwrite" in capsys.readouterr().out

    resumed = cifar_towers.train(train_dir=started, **SETTINGS)
    assert resumed.result["weights_sha256"] == run.result["weights_sha256"]
    assert "resuming" in capsys.readouterr().out


@pytest.mark.parametrize(("level", "is_shown"), [(logging.NOTSET, True), (logging.WARNING, False)])
def test_the_log_is_printed_although_a_library_has_logged_a_warning(
    run, monkeypatch, capsys, level, is_shown
):
    """With the first warning that is logged without a logger, the root logger gets a handler of its
    own.
    """
    logger = logging.getLogger("cifar_towers")
    monkeypatch.setattr(logger, "level", level)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(cifar10, "is_available", lambda data_dir: False)
    logging.warning("theirs")
    # logs which data set it takes, and that the run is complete
    cifar_towers.train(train_dir=run.directory, **SETTINGS | {"dataset": "auto"})
    out, err = capsys.readouterr()

    assert (str(run.directory) in out) == is_shown
    assert err == "WARNING:root:theirs\n"
    assert ("dataset=auto is synthetic" in out) == is_shown
    assert logger.level == level
    assert logger.propagate


def test_the_log_is_left_to_a_process_that_shows_it(run, caplog, capsys):
    caplog.set_level("INFO")
    cifar_towers.train(train_dir=run.directory, **SETTINGS)
    assert str(run.directory) in caplog.text
    assert capsys.readouterr() == ("", "")
