"""The import of the package sets variables for TensorFlow; each test has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
SHOW = f"import os; print(*(os.environ.get(name) for name in {list(SETTINGS)}))"


def run(code, tensorflow="", **variables):
    """Run `code` with another module in place of TensorFlow, unless that is empty; return (stdout, stderr)."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {"PYTHONPATH": f"{tensorflow}:{ROOT}", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def tensorflow(tmp_path):
    """Return the directory of a module `tensorflow` that prints what TensorFlow would read."""
    (tmp_path / "tensorflow.py").write_text(SHOW)
    return tmp_path


def test_variables_are_set_before_tensorflow_is_imported(tensorflow):
    assert run("import cifar_towers, tensorflow", tensorflow) == (" ".join(SETTINGS.values()) + "\n", "")


def test_variables_of_the_user_are_kept(tensorflow):
    out, err = run("import cifar_towers, tensorflow", tensorflow, TF_ENABLE_ONEDNN_OPTS="0", KERAS_BACKEND="jax")
    assert out == "jax 3 0 PCI_BUS_ID\n" and not err


def test_tensorflow_imported_first_is_one_line_with_what_to_do(tensorflow):
    code = "import tensorflow, cifar_towers, cifar_towers.errors, importlib; importlib.import_module('cifar_towers')"
    out, err = run(f"{code}; {SHOW}", tensorflow)
    assert out == 2 * "None None None None\n"  # setting them now would be too late
    assert "half as fast" in err and "TF_ENABLE_ONEDNN_OPTS=1" in err
    assert len(err.splitlines()) == 1
    for value in "01":
        assert run(code, tensorflow, TF_ENABLE_ONEDNN_OPTS=value)[1] == ""


def test_tensorflow_itself_has_onednn_on():
    _, messages = run("import cifar_towers, tensorflow", TF_CPP_MIN_LOG_LEVEL="0")
    assert "oneDNN custom operations are on" in messages


def test_the_import_is_quick():
    """Nothing that takes long is imported."""
    out, _ = run("import sys, cifar_towers; print(*sys.modules)")
    assert not {"numpy", "keras", "tensorflow", "rich", "matplotlib"} & {*out.split()}
