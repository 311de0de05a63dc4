"""The package from Python: runs, their records and models, interrupts, and the sentences of the command line."""

import logging
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import cifar_towers
from cifar_towers import api
from cifar_towers.data import synthetic
from cifar_towers.errors import UsageError
from tests.configs import TINY_NET
from tests.runs.short_runs import small_runs

SETTINGS = {
    "model": TINY_NET, "dataset": "synthetic", "shift": 0, "batch_size": 50, "epochs": 1,
    "learning_rate": 0.1, "precision": "float32", "num_gpus": 2, "summary_every_steps": 10, "optimizer": "momentum",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_set():
    small = synthetic.make(400, 0, 0), synthetic.make(100, 0, 1)
    with small_runs(*small):
        yield small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cifar_towers.train(train_dir=tmp_path_factory.mktemp("runs") / "one", **SETTINGS)


def test_a_run_has_its_records_and_is_evaluated_and_loaded(run):
    assert [record["step"] for record in run.history] == list(range(1, 9)) and run.result["step"] == 8
    assert run.config["batch_size"] == 50 and run.evaluations[-1]["split"] == "test"
    score = cifar_towers.evaluate(run, model=TINY_NET, precision="float32")
    assert cifar_towers.evaluate(run, model=TINY_NET) == score and score["precision"] == "float32"
    assert score["count"] == 100 and score["accuracy"] == run.result["evaluations"][-1]["accuracy"]
    loaded = cifar_towers.load_run(str(run.directory))
    assert loaded.history == run.history and loaded.result == run.result
    assert run.class_names == [*score["per_class"]]
    with pytest.raises(UsageError, match=r"nowhere is not the directory of a run"):
        cifar_towers.load_run("nowhere")


def test_a_run_in_a_relative_directory_keeps_its_records_in_another_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.directory.parent)
    loaded = cifar_towers.load_run(run.directory.name)
    monkeypatch.chdir(tmp_path)
    assert loaded.history == run.history and loaded.result == run.result
    (tmp_path / "config.json").touch()
    assert cifar_towers.load_run(".").class_names == []


def test_a_run_that_goes_on_after_its_result_has_none(run, tmp_path):
    continued = cifar_towers.load_run(shutil.copytree(run.directory, tmp_path / "continued"))
    assert continued.result == run.result
    with (continued.directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9}\n')
    assert continued.result is None


def test_the_model_takes_levels_and_gives_the_probabilities_that_predict_gives(run, small_set, tmp_path):
    images, labels = small_set[1].images[:30], small_set[1].labels
    probabilities = cifar_towers.predict(run, images, model=TINY_NET, precision="float32")
    np.testing.assert_array_equal(run.predict(images, model=TINY_NET, precision="float32"), probabilities)
    model = run.model(model=TINY_NET)
    np.testing.assert_allclose(model.predict(images, verbose=0), probabilities, atol=1e-5)
    whole = cifar_towers.predict(run, small_set[1].images, model=TINY_NET, precision="float32")
    assert (whole.argmax(1) == labels).mean() == pytest.approx(run.result["evaluations"][-1]["accuracy"])
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, image in zip(paths, images, strict=False):
        Image.fromarray(image).save(path)
    of_files = cifar_towers.predict(run, paths, model=TINY_NET, precision="float32")
    np.testing.assert_allclose(of_files, probabilities[:3], atol=1e-6)
    of_folder = cifar_towers.predict(run, tmp_path, model=TINY_NET, precision="float32")
    np.testing.assert_allclose(of_folder, of_files, atol=1e-6)
    of_one_file = cifar_towers.predict(run, paths[0], model=TINY_NET, precision="float32")
    np.testing.assert_allclose(of_one_file, probabilities[:1], atol=1e-6)


def test_random_numbers_and_layer_names_of_the_caller_go_on(run, small_set):
    def draw():
        drawn = tf.random.uniform([]), keras.random.uniform([])
        return [random.random(), np.random.rand(), *map(float, drawn)], keras.layers.Dense(1).name

    keras.utils.set_random_seed(7)
    expected = [draw()[0] for _ in range(2)]
    keras.utils.set_random_seed(7)
    first, name = draw()
    cifar_towers.predict(run, small_set[1].images[:2], model=TINY_NET, precision="float32")
    second, other_name = draw()
    assert [first, second] == expected and name != other_name


def test_the_settings_of_the_callers_keras_change_nothing_and_are_kept(run, small_set, tmp_path):
    images, models = small_set[1].images[:30], []
    caller = {"dtype_policy": "mixed_bfloat16", "floatx": "float16", "image_data_format": "channels_first"}
    defaults = {"dtype_policy": "float32", "floatx": "float32", "image_data_format": "channels_last"}
    try:
        for settings in (caller, defaults):
            for name, value in settings.items():
                getattr(keras.config, f"set_{name}")(value)
            models.append(run.model(model=TINY_NET))
            cifar_towers.predict(run, images[:2], model=TINY_NET, precision="float32")
            cifar_towers.train(train_dir=run.directory, **SETTINGS)
            cifar_towers.evaluate(run, model=TINY_NET, precision="float32")
            now = {name: getattr(keras.config, name)() for name in settings}
            assert now | {"dtype_policy": now["dtype_policy"].name} == settings
    finally:
        for name, value in defaults.items():
            getattr(keras.config, f"set_{name}")(value)
    np.testing.assert_array_equal(*(model.predict(images, verbose=0) for model in models))


def test_another_backend_of_keras_is_refused(run, small_set, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match="^Keras has the backend jax; towers need KERAS_BACKEND=tensorflow"):
        cifar_towers.predict(run, small_set[1].images[:2], model=TINY_NET)


def test_what_only_the_programs_do_is_refused():
    with pytest.raises(UsageError, match="seeds is for the programs"):
        cifar_towers.train(seeds="0,1")


def test_an_interrupt_saves_and_the_same_call_resumes_to_the_same_bits(run, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = cifar_towers.train(train_dir=tmp_path, callbacks=[interrupt], **SETTINGS)
    assert stopped.result is None and 3 <= stopped.history[-1]["step"] < 8
    assert signal.getsignal(signal.SIGINT) is before and "saved step" in capsys.readouterr().out
    resumed = cifar_towers.train(train_dir=tmp_path, **SETTINGS)
    assert resumed.result["weights_sha256"] == run.result["weights_sha256"]


def test_an_interrupt_after_overwrite_says_that_overwrite_would_delete_the_run(run, tmp_path, capsys):
    def interrupt(step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    started = shutil.copytree(run.directory, tmp_path / "run")
    stopped = cifar_towers.train(train_dir=started, overwrite=True, callbacks=[interrupt], **SETTINGS)
    assert stopped.result is None
    assert capsys.readouterr().out.endswith(": the same command resumes, without --overwrite\n")


def test_training_in_another_thread(run, tmp_path):
    """Python handles signals in the main thread alone."""
    runs = []
    thread = threading.Thread(target=lambda: runs.append(cifar_towers.train(train_dir=tmp_path, **SETTINGS)))
    thread.start()
    thread.join()
    assert runs[0].result["weights_sha256"] == run.result["weights_sha256"]


@pytest.mark.parametrize(("level", "shown"), [(logging.NOTSET, "said\n"), (logging.WARNING, "")])
def test_the_log_is_printed_although_a_library_has_logged_a_warning(monkeypatch, capsys, level, shown):
    """With the first warning that is logged without a logger, the root logger gets a handler of its own."""
    logger = logging.getLogger("cifar_towers")
    monkeypatch.setattr(logger, "level", level)
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.warning("theirs")
    with api._visible_log():
        logger.info("said")
    assert capsys.readouterr() == (shown, "WARNING:root:theirs\n") and logger.level == level and logger.propagate


def test_the_log_is_left_to_a_process_that_shows_it(caplog, capsys):
    caplog.set_level("INFO")
    with api._visible_log():
        logging.getLogger("cifar_towers").info("said")
    assert caplog.messages == ["said"] and capsys.readouterr() == ("", "")


def test_a_changed_file_of_the_users_is_read_and_named(tmp_path, capsys):
    code = "import tensorflow as tf\n\n\ndef loss(labels, logits):\n    print('share', {share})\n"
    code += "    return {share} * tf.nn.softmax_cross_entropy_with_logits(labels, logits)\n"
    file = tmp_path / "mine.py"
    for steps, share in ((1, 1.0), (2, 0.95)):
        file.write_text(code.format(share=share))
        cifar_towers.train(max_steps=steps, train_dir=tmp_path / "run", loss=f"{file}:loss", **SETTINGS)
        printed = capsys.readouterr().out
        assert f"share {share}" in printed
        assert ("code of loss " in printed) == (steps == 2)


@pytest.mark.slow
def test_the_documented_example(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs/training.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    last = scope["run"].history[-1]
    assert scope["losses"][last["step"]] == last["loss"] and 0 <= float(capsys.readouterr().out.split()[-1]) <= 1
