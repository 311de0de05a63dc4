"""Full disks in a whole run; test_directory.py has the rest."""

import json
from signal import SIGTERM
from unittest.mock import DEFAULT, Mock

import pytest

from cifar_towers.errors import Interrupted, RunError
from cifar_towers.runs import directory as directory_module
from cifar_towers.runs.checkpoint import list_checkpoints
from cifar_towers.signals import StopSignals
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import TINY, run

NO_SPACE = OSError(28, "No space left on device")


def test_a_last_step_that_cannot_be_saved_is_an_error_after_its_score(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(directory_module, "write_checkpoint", Mock(side_effect=NO_SPACE))
    with pytest.raises(RunError, match="step, 2"):
        run(TINY, tmp_path, max_steps=2)
    assert not (tmp_path / "result.json").exists()
    assert lines_with(capsys.readouterr().out, "test ", "%")


def test_the_last_step_is_saved_after_its_score_if_it_could_not_be_before(tmp_path, monkeypatch):
    full = Mock(side_effect=[NO_SPACE, DEFAULT], wraps=directory_module.write_checkpoint)
    monkeypatch.setattr(directory_module, "write_checkpoint", full)
    result = run(TINY, tmp_path, max_steps=2)
    assert result["failed_saves"] == 1
    assert full.call_count == 2
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-2.npz"]
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 2


def test_a_signal_during_the_last_save_ends_the_run_before_its_score(tmp_path, monkeypatch):
    signals = StopSignals(())
    write = directory_module.write_checkpoint

    def write_with_signal(*arguments):
        signals.received = SIGTERM
        write(*arguments)

    monkeypatch.setattr(directory_module, "write_checkpoint", write_with_signal)
    with pytest.raises(Interrupted, match="saved step 2") as caught:
        run(TINY, tmp_path, signals, max_steps=2)

    assert caught.value.exit_code == 128 + SIGTERM
    assert not (tmp_path / "result.json").exists()
    assert run(TINY, tmp_path, max_steps=2)["step"] == 2


def test_a_run_stays_in_its_directory_when_the_users_code_changes_the_current_one(
    tmp_path, monkeypatch
):
    """It is given as a relative path, and `loss` is loaded after it was opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").write_text(
        "import os\nimport tensorflow as tf\n\nos.chdir('elsewhere')\n\n"
        "def loss(labels, logits):\n    return tf.reduce_sum((labels - logits) ** 2, 1)\n"
    )
    settings = {"loss": f"{tmp_path}/mine.py:loss", "label_smoothing": 0.0, "max_steps": 1}
    result = run(TINY, "here", **settings)
    written = {path.name for path in (tmp_path / "here").iterdir()}

    assert {"config.json", "metrics.jsonl", "result.json", "step-1.npz", "train"} <= written
    assert not list((tmp_path / "elsewhere").iterdir())
    assert result["step"] == 1


def test_what_cannot_be_written_does_not_stop_a_run(tmp_path, monkeypatch, caplog):
    """The disk is full for a while. Without config.json no run can be loaded, so it is written
    later.
    """
    full = Mock(
        side_effect=[DEFAULT, NO_SPACE, NO_SPACE, DEFAULT], wraps=directory_module.write_checkpoint
    )
    monkeypatch.setattr(directory_module, "write_checkpoint", full)
    config = tmp_path / "config.json"
    config.mkdir()
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "train").write_text("in the way of the event files")
    free = [lambda step, _: step == 1 and config.rmdir()]
    result = run(TINY, tmp_path, max_steps=4, checkpoint_every_steps=1, callbacks=free)

    assert result["failed_saves"] == 2
    assert len(lines_with(caplog.text, "No space left on device")) == 2
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1.npz", "step-4.npz"]
    assert json.loads(config.read_text())["max_steps"] == 4
    for name in ("config.json", "metrics.jsonl", "train"):
        assert lines_with(caplog.text, f"{tmp_path / name} cannot be written")
