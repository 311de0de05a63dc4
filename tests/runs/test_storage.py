"""Full disks, and a damaged checkpoint in a whole run; tests/checkpointing has the rest."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cifar_towers import files
from cifar_towers.checkpointing import run_directory
from cifar_towers.errors import RunError
from tests.messages import lines_with
from tests.runs.short_runs import TINY, run

TWO_TOWERS = replace(TINY, num_gpus=2)
NO_SPACE = OSError(28, "No space left on device")


def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_weights(saved_run, tiny_run, capsys, caplog):
    damaged = saved_run / "step-20.npz"
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    assert run(TWO_TOWERS, saved_run)["weights_sha256"] == tiny_run[1]["weights_sha256"]
    assert len(lines_with(caplog.text, " damaged")) == 1
    assert lines_with(capsys.readouterr().out, "resuming", "step 18")
    assert (saved_run / "step-20.npz.damaged").exists()


@pytest.mark.slow
def test_failed_save_is_logged_and_retried(tmp_path, tiny_run, monkeypatch, capsys, caplog):
    """Fill the disk for a while: older checkpoints stay and the final weights are the same."""
    write, calls = run_directory.write_checkpoint, []

    def sometimes_full(path, *arguments):
        calls.append(path.name)
        if 2 <= len(calls) <= 4:
            raise NO_SPACE
        write(path, *arguments)

    monkeypatch.setattr(run_directory, "write_checkpoint", sometimes_full)
    result = run(TWO_TOWERS, tmp_path, checkpoint_every_steps=3)
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"] and result["failed_saves"] == 3
    assert lines_with(caplog.text, "step 6", "not be saved", "No space left on device", "step-3.npz")
    output = capsys.readouterr().out
    assert lines_with(output, "3 checkpoints", "not be saved")


def test_failed_final_save_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_directory, "write_checkpoint", Mock(side_effect=NO_SPACE))
    with pytest.raises(RunError, match="step 2.* not be saved"):
        run(TINY, tmp_path, max_steps=2)
    assert "test " in capsys.readouterr().out  # the score is printed nevertheless


def test_unwritable_records_do_not_stop_a_run(tmp_path, caplog):
    """Train where a power loss has left an empty config.json, too."""
    (tmp_path / "config.json").write_text("")
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "train").write_text("in the way of the event files")
    assert run(TINY, tmp_path, max_steps=2)["step"] == 2
    assert len(lines_with(caplog.text, "training continues without")) == 2


def test_config_that_could_not_be_written_is_written_at_the_end(tmp_path, monkeypatch):
    """Without config.json no run can be loaded."""
    write, path = files.write_whole, tmp_path / "config.json"
    full = Mock(side_effect=[NO_SPACE, None, None])

    def write_later(place, content):
        if place == path:
            full()
        write(place, content)

    monkeypatch.setattr(files, "write_whole", write_later)
    run(TINY, tmp_path, max_steps=2)
    assert full.call_count == 2 and json.loads(path.read_text())["max_steps"] == 2
