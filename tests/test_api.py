"""The package from Python: runs, their records and models, interrupts, and the sentences of the command line."""

import logging
import os
import random
import shutil
import signal
import threading
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import cifar_towers
from cifar_towers import api
from cifar_towers.data import synthetic
from cifar_towers.errors import RunError, UsageError
from cifar_towers.models import user_model
from cifar_towers.reporting.run_logger import CallbackError
from tests.configs import TINY_NET, net
from tests.runs.short_runs import small_runs

CHECK_MODEL = user_model._check_model  # which `small_runs` leaves out
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


def test_the_model_does_not_depend_on_the_policy_of_the_caller(run, small_set):
    images, models = small_set[1].images[:30], []
    try:
        for policy in ("mixed_bfloat16", "float32"):
            keras.config.set_dtype_policy(policy)
            models.append(run.model(model=TINY_NET))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(*(model.predict(images, verbose=0) for model in models))


def test_each_run_names_the_weights_that_it_does_not_train(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(user_model, "_check_model", CHECK_MODEL)
    caplog.set_level("INFO", "cifar_towers")
    settings = SETTINGS | {"model": net("stopped"), "max_steps": 1}
    for name in ("first", "second"):
        caplog.clear()
        cifar_towers.train(train_dir=tmp_path / name, **settings)
        assert "not trained, as they have no gradient: still/kernel, still/bias" in caplog.messages


def test_another_backend_of_keras_is_refused(run, small_set, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match="^Keras was imported with jax; set KERAS_BACKEND=tensorflow before"):
        cifar_towers.predict(run, small_set[1].images[:2], model=TINY_NET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1}, r"^lr is not a flag; did you mean learning_rate\? --helpfull"),
        ({"epochs": -1}, "epochs=-1.0 is too small"),
        ({"recipe": "sped94"}, "did you mean speed94"),
        ({"seeds": "0,1"}, "seeds is for the programs"),
        ({"callback": "nowhere.py:f"}, "callback=nowhere.py:f: there is no file nowhere.py"),
        ({"callbacks": 3}, r"callbacks=3 is no list; write callbacks=\[...\]"),
    ],
)
def test_settings_are_refused_with_the_sentence_of_the_command_line(settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        cifar_towers.train(**settings)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len(frames) == 2 and frames[0].filename == __file__  # and one of the package


def test_an_error_in_the_run_names_settings_and_no_flags(tmp_path):
    with pytest.raises(UsageError, match=r"batch_size=1000 is more than the 400 .*; give batch_size=256$"):
        cifar_towers.train(train_dir=tmp_path, **SETTINGS | {"batch_size": 1000})


def test_weights_that_are_not_expected_are_an_error(run):
    """A run that is finished is checked too, as on the command line."""
    expected, settings = run.result["weights_sha256"], {"train_dir": run.directory, **SETTINGS}
    assert cifar_towers.train(expect_sha256=expected[:16], **settings).result == run.result
    message = f"weights after step 8 have sha256 {expected[:16]}, not expect_sha256=0123456789abcdef: "
    with pytest.raises(RunError, match=message):
        cifar_towers.train(expect_sha256="0123456789abcdef", **settings)


def test_an_error_in_a_callback_is_one_sentence_with_its_place(tmp_path):
    def fail(step, metrics):
        raise OSError("no")

    with pytest.raises(CallbackError) as caught:
        cifar_towers.train(train_dir=tmp_path, callbacks=[fail], **SETTINGS)
    line = fail.__code__.co_firstlineno + 1
    assert f"callback fail, on_step: test_api.py, line {line}: OSError: no; saved step" in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


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
    assert capsys.readouterr().out.endswith(": the same command without overwrite resumes\n")


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


def test_own_code_is_shared_by_settings_and_refused_with_a_variable_and_its_changes_are_named(tmp_path, capsys):
    code = """
import tensorflow as tf

traced, share = [], {share}

def loss(labels, logits):
    traced.append("loss")
    return share * tf.nn.softmax_cross_entropy_with_logits(labels, logits)

def follow(step, metrics):
    open(__file__ + ".out", "a").write(f"{{step}} {{traced[0]}} ")
"""
    file = tmp_path / "mine.py"
    settings = SETTINGS | {"train_dir": tmp_path, "loss": f"{file}:loss", "callback": f"{file}:follow"}
    for steps, share in ((1, "1.0"), (2, "0.95")):
        file.write_text(code.format(share=share))
        cifar_towers.train(max_steps=steps, **settings)
        changed = f"loss={file}:loss: the file has changed since step 1, so" in capsys.readouterr().out
        assert changed == (steps == 2)
    assert (tmp_path / "mine.py.out").read_text() == "1 loss 2 loss "
    file.write_text(code.format(share="tf.Variable(0.95)"))
    with pytest.raises(UsageError, match=r"^loss=\S+mine.py:loss: it uses a tf.Variable or another resource"):
        cifar_towers.train(max_steps=3, **settings)


@pytest.mark.slow
def test_the_documented_example(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs/python.md").read_text()
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(page.split("```")[1], scope)
    last = scope["run"].history[-1]
    assert scope["losses"][last["step"]] == last["loss"] and 0 <= float(capsys.readouterr().out.split()[-1]) <= 1
