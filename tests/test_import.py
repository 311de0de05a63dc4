"""The import of the package sets variables for TensorFlow, in processes with another module in its
place.
"""

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


@pytest.fixture
def run(tmp_path):
    """Return run(code, **variables) -> (stdout, stderr), for which TensorFlow prints the variables
    it would read.
    """
    (tmp_path / "tensorflow.py").write_text(SHOW)

    def run(code, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", **variables}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr

    return run


def test_variables_are_set_before_tensorflow_is_imported_and_the_users_are_kept(run):
    code = "import cifar_towers, tensorflow"
    assert run(code) == (" ".join(SETTINGS.values()) + "\n", "")
    assert run(code, TF_ENABLE_ONEDNN_OPTS="0", KERAS_BACKEND="jax") == ("jax 3 0 PCI_BUS_ID\n", "")


def test_tensorflow_imported_first_is_one_line_with_what_to_do(run):
    code = "import tensorflow, cifar_towers, cifar_towers.errors, importlib; "
    code += "importlib.import_module('cifar_towers')"
    out, err = run(f"{code}; {SHOW}")
    assert out == 2 * "None None None None\n"  # setting them now would be too late
    assert "TF_ENABLE_ONEDNN_OPTS=1" in err
    assert len(err.splitlines()) == 1
    assert run(code, TF_ENABLE_ONEDNN_OPTS="0")[1] == ""


@pytest.mark.parametrize(
    ("failure", "variables", "is_shown"),
    [
        ("", {}, False),
        ("", {"TF_CPP_MIN_LOG_LEVEL": "0"}, True),
        ("raise ImportError('broken')", {}, True),
    ],
)
def test_lines_of_native_code_are_shown_if_asked_for_or_if_the_import_fails(
    run, tmp_path, failure, variables, is_shown
):
    line = "oneDNN is on\n"
    (tmp_path / "keras.py").write_text(f"import os\nos.write(2, {line.encode()})\n{failure}\n")
    code = "import contextlib, cifar_towers.hardware as h\nwith contextlib.suppress(Exception):\n"
    code += "    h.tensorflow_imported().__enter__()"
    assert run(code, **variables)[1] == (line if is_shown else "")
