"""Full disks, damaged files, foreign files, and checkpoints that are kept."""

import json
import shutil
from dataclasses import replace
from signal import SIGTERM
from unittest.mock import Mock

import pytest

from cifar_towers import files
from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.checkpoint import checkpoint_path, list_checkpoints, read_metadata
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.errors import DataError, Interrupted, RunError, UsageError
from cifar_towers.inference import evaluate
from cifar_towers.shutdown import ShutdownHandler
from tests.messages import lines_with
from tests.runs.short_runs import STEPS, TINY, StopAtStep, records_of, run

TWO_TOWERS = replace(TINY, num_gpus=2)
NO_SPACE = OSError(28, "No space left on device")


def test_damaged_checkpoint_is_quarantined_and_the_previous_one_restored(saved_run, tiny_run, capsys, caplog):
    damaged = saved_run / "checkpoints/step-00000020/state.data-00000-of-00001"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    evaluate.evaluate_checkpoint(
        EvaluateConfig(train_dir=str(saved_run), model=TINY.model)
    )  # warns and changes nothing
    assert len(lines_with(caplog.text, "damaged", "step-00000020", "step-00000018")) == 1
    capsys.readouterr()
    assert run(TWO_TOWERS, saved_run)["weights_sha256"] == tiny_run[1]["weights_sha256"]
    output = capsys.readouterr().out
    assert len(lines_with(output, " damaged")) == 1 and lines_with(output, "resuming", "step 18")
    assert (saved_run / "checkpoints/damaged-step-00000020").is_dir()


def test_a_start_hashes_each_checkpoint_once(saved_run, monkeypatch):
    validate, hashed = files.validate, []
    monkeypatch.setattr(files, "validate", lambda path, *options: hashed.append(path) or validate(path, *options))
    assert run(TWO_TOWERS, saved_run, variable_placement="auto")["step"] == STEPS  # as the run began
    assert hashed == list_checkpoints(saved_run)


def test_run_with_only_damaged_checkpoints_is_refused(saved_run):
    for checkpoint in list_checkpoints(saved_run):
        (checkpoint / "metadata.json").unlink()
    for _ in range(2):  # the second time they have other names
        with pytest.raises(DataError, match="every checkpoint .*damaged.* --overwrite"):
            run(TWO_TOWERS, saved_run)
    assert run(TWO_TOWERS, saved_run, overwrite=True, max_steps=1)["step"] == 1


def test_a_finished_run_without_its_checkpoints_is_refused_or_overwritten(saved_run):
    """It would start again in silence, and leave the old result.json for the new training."""
    shutil.rmtree(saved_run / "checkpoints")
    before = {name: (saved_run / name).read_bytes() for name in ("metrics.jsonl", "result.json")}
    again = replace(TWO_TOWERS, train_dir=str(saved_run))
    for start in (workdir.check_settings, run):
        with pytest.raises(UsageError, match="saved holds the result .*no checkpoint.* put its checkpoints/ back, or"):
            start(again)
    assert before == {name: (saved_run / name).read_bytes() for name in before}
    assert run(again, overwrite=True, max_steps=1)["step"] == 1


def test_run_of_an_earlier_version_is_refused_or_overwritten(saved_run):
    """Its newest checkpoint is undamaged, and has metadata that cannot be read any more."""
    earlier = checkpoint_path(saved_run, STEPS + 1)
    files.commit(earlier, lambda directory: (directory / "facts.json").write_text("{}"))
    with pytest.raises(UsageError, match=f"{earlier} .*earlier version.* --overwrite to start again in this one"):
        run(TWO_TOWERS, saved_run)
    assert earlier.exists()
    assert run(TWO_TOWERS, saved_run, overwrite=True, max_steps=1)["step"] == 1
    assert list_checkpoints(saved_run) == [checkpoint_path(saved_run, 1)]


@pytest.mark.slow
def test_failed_save_is_logged_and_retried(tmp_path, tiny_run, monkeypatch, capsys):
    """Fill the disk for a while: older checkpoints stay and the final weights are the same."""
    commit, calls = files.commit, []

    def sometimes_full(final, write):
        calls.append(final.name)
        if 2 <= len(calls) <= 4:
            raise NO_SPACE
        commit(final, write)

    monkeypatch.setattr(files, "commit", sometimes_full)
    result = run(TWO_TOWERS, tmp_path, checkpoint_every_steps=3)
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"] and result["failed_saves"] == 3
    output = capsys.readouterr().out
    assert lines_with(output, "step 6", "not be saved", "No space left on device", "step-00000003")
    assert lines_with(output, "3 checkpoints", "not be saved")


def test_failed_final_save_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "commit", Mock(side_effect=NO_SPACE))
    with pytest.raises(RunError, match="step 2.* not be saved"):
        run(TINY, tmp_path, max_steps=2)
    assert "test " in capsys.readouterr().out  # the score is printed nevertheless


def test_an_interrupt_of_the_evaluation_names_the_checkpoint_that_is_kept(tmp_path, monkeypatch):
    """The disk is full when the last step is to be saved."""

    class InterruptedAtTheEnd(ShutdownHandler):
        def exit_immediately_from_now(self, message):
            self.signal = SIGTERM if list_checkpoints(tmp_path) else 0
            super().exit_immediately_from_now(message)

    commit = files.commit
    full = Mock(side_effect=NO_SPACE)
    monkeypatch.setattr(files, "commit", lambda *args: full() if list_checkpoints(tmp_path) else commit(*args))
    with pytest.raises(Interrupted, match="^step-00000001 is kept$"):
        run(TINY, tmp_path, InterruptedAtTheEnd(), max_steps=2, checkpoint_every_steps=1)


def test_unwritable_records_do_not_stop_a_run(tmp_path, caplog):
    """Train where a power loss has left an empty config.json, too."""
    (tmp_path / "config.json").write_text("")
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "train").write_text("in the way of the event files")
    assert run(TINY, tmp_path, max_steps=2)["step"] == 2
    assert len(lines_with(caplog.text, "training continues without")) == 2


def test_config_that_could_not_be_written_is_written_at_the_end(tmp_path, monkeypatch, capsys):
    """Lose config.json, without which no run can be loaded: the end of the run and a restart write it again."""
    write, path = files.write_whole, tmp_path / "config.json"
    with monkeypatch.context() as patch:
        full = Mock(side_effect=NO_SPACE)
        patch.setattr(files, "write_whole", lambda place, text: full() if place == path else write(place, text))
        result = run(TINY, tmp_path, max_steps=2)
    assert (tmp_path / "result.json").exists() and not path.exists()
    assert run(TINY, tmp_path, max_steps=2)["weights_sha256"] == result["weights_sha256"]
    assert json.loads(path.read_text())["max_steps"] == 2
    capsys.readouterr()
    run(TINY, tmp_path, max_steps=2)
    assert lines_with(capsys.readouterr().out, "complete", "step 2")


@pytest.mark.slow
def test_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    run(TINY, tmp_path, checkpoint_every_steps=2, keep_checkpoints=1, eval_every_epochs=0.2)
    kept = [read_metadata(path) for path in list_checkpoints(tmp_path)]
    scores = {r["step"]: r["accuracy"] for r in records_of(tmp_path, "eval") if r["weights"] == "ema"}
    best = max((step for step in scores if step < STEPS), key=lambda step: scores[step])
    assert [metadata["step"] for metadata in kept] == [best, STEPS] and kept[0]["accuracy"] == scores[best]


def test_overwrite_applies_once_per_launch_and_keeps_foreign_files(tmp_path, capsys):
    mine = [tmp_path / name for name in ("notes.txt", "train/cat/1.png", "eval/table.csv", "checkpoints/best.h5")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    weights = set()
    for launch_id, complete in (("one", False), ("one", True), ("another", False)):
        weights.add(run(TINY, tmp_path, launch_id=launch_id, max_steps=1, overwrite=True)["weights_sha256"])
        assert bool(lines_with(capsys.readouterr().out, "complete", "step 1")) == complete
    assert len(weights) == 1
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    (tmp_path / "train" / ".tmp-kept").write_text("left by a kill")
    workdir.clear(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([*mine, tmp_path / ".lock"])
    others = tmp_path / "train" / "events.out.tfevents.1"
    others.write_text("of a program that keeps checkpoints/ and train/ too")
    workdir.clear(tmp_path)
    assert others.exists() and all(path.exists() for path in mine)


def test_an_interrupt_after_overwrite_says_that_overwrite_would_delete_the_run(tmp_path):
    """The launcher starts the second process anew, which resumes; its user would type `--overwrite` again too."""
    for at, steps_left in ((2, 2), (3, 1)):
        with pytest.raises(Interrupted, match=f"^saved step {at}: the same command without --overwrite resumes$"):
            run(TINY, tmp_path, StopAtStep(steps_left), launch_id="one", max_steps=5, overwrite=True)
    with pytest.raises(Interrupted, match="^saved step 4: the same command resumes$"):
        run(TINY, tmp_path, StopAtStep(1), max_steps=5)
