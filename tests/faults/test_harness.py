"""A finished trial is not repeated."""

from tests.faults import harness


def test_a_finished_trial_is_not_repeated(tmp_path):
    ran, path = [], tmp_path / "trials.jsonl"
    experiment = harness.Experiment(
        "fault", ("ours",), 2, 3, lambda trial: ran.append(trial.index) or "held"
    )
    harness.run(experiment, harness.TrialLog(path), long=False)
    path.write_text(path.read_text() + '{"fault": "fault", "sub')  # cut short
    harness.run(experiment, harness.TrialLog(path), long=True)
    assert ran == [0, 1, 2] and len(harness.TrialLog(path).rows) == 3
