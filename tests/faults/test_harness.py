"""A finished trial is not repeated; a trial of other code is."""

from tests.faults import harness


def test_a_finished_trial_is_not_repeated(tmp_path):
    ran = []

    def trial(trial):
        ran.append(trial.index)
        return "held"

    experiment = harness.Experiment("fault", ("ours",), 2, 3, trial)
    for long in (False, True):
        harness.run(experiment, harness.TrialLog(tmp_path / "trials.csv"), long=long, seed=0)
    assert ran == [0, 1, 2]


def test_code_digest_follows_code_and_recipes_alone(tmp_path):
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "module.py"
    module.write_text("old")
    before = harness.code_digest(tmp_path)
    (tmp_path / "package" / "module.pyc").write_text("compiled")
    assert harness.code_digest(tmp_path) == before
    for change in (lambda: module.write_text("new"), lambda: module.rename(tmp_path / "recipe.cfg")):
        change()
        before, digest = harness.code_digest(tmp_path), before
        assert before != digest
