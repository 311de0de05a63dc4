"""A finished trial is not repeated."""

import pytest

from tests.faults import __main__ as faults
from tests.faults import harness
from tests.faults.subjects import ALL, OURS


def test_a_finished_trial_is_not_repeated(tmp_path):
    ran = []
    path = tmp_path / "trials.jsonl"
    experiment = harness.Experiment(
        "fault", (OURS,), 2, 3, lambda trial: ran.append(trial.index) or "held"
    )
    harness.run(experiment, harness.TrialLog(path), long=False)
    path.write_text(path.read_text() + '{"fault": "fault", "sub')  # cut short
    harness.run(experiment, harness.TrialLog(path), long=True)

    assert ran == [0, 1, 2]
    assert len(harness.TrialLog(path).rows) == 3


@pytest.mark.parametrize(("long", "subjects"), [(False, [OURS]), (True, [*ALL])])
def test_others_are_tried_with_long_only(tmp_path, long, subjects):
    ran = []
    experiment = harness.Experiment(
        "fault", ALL, 1, 1, lambda trial: ran.append(trial.subject) or "held"
    )
    harness.run(experiment, harness.TrialLog(tmp_path / "trials.jsonl"), long=long)
    assert ran == subjects


def test_trials_that_are_not_made_are_no_success(monkeypatch, tmp_path, capsys):
    """A wrong name is refused, and so is what this machine cannot try."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["faults", "--only=no such fault"])
    assert faults.main() == 2
    monkeypatch.setattr("sys.argv", ["faults", "--only=full disk|same seed"])
    monkeypatch.setattr(harness, "run", lambda experiment, log, long: None)

    assert faults.main() == 1
    assert "NOT TRIED same seed" in capsys.readouterr().out
