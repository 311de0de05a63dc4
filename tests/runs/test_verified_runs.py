"""Runs that verify steps: what a flipped bit leaves, and what cannot be verified."""

import logging
import weakref
from dataclasses import replace

import pytest

from cifar_towers import devices, trainer
from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.errors import CorruptedError, UsageError
from cifar_towers.reporting.run_logger import RunLogger
from cifar_towers.towers import Tower
from tests.runs.short_runs import STEPS, TINY, records_of, run
from tests.training.flips import BitFlip


@pytest.fixture
def inject_flip(monkeypatch):
    """Return inject_flip(tower, steps), which flips a bit in the tower's gradient in these steps of all later runs."""
    start_step = trainer.Run.start_step

    def of(tower, steps):
        flip = BitFlip(tower)
        flip.install(monkeypatch.setattr)

        def start(self, step, batch):
            flip.switch(step + 1 in steps)
            return start_step(self, step, batch)

        monkeypatch.setattr(trainer.Run, "start_step", start)
        return flip

    return of


def test_flipped_bit_ends_a_run_that_resumes_to_the_weights_of_an_undisturbed_one(tmp_path, tiny_run, inject_flip):
    """Verify every second step, of which the second checks tower 1; then every third."""
    steps = {4}
    flip = inject_flip(1, steps)
    config = replace(TINY, num_gpus=2, checkpoint_every_steps=1, keep_checkpoints=100, summary_every_steps=1)
    with pytest.raises(CorruptedError) as caught:
        run(config, tmp_path, verify_every_steps=2)
    assert f"step 4 is not applied: the gradient of {flip.name} of tower_1 (/CPU:1) has other bits" in str(caught.value)
    assert "tower_0 (/CPU:0)" in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["01", "02", "03"]
    assert [record["step"] for record in records_of(tmp_path, "train")] == [1, 2, 3]
    steps.clear()
    result = run(config, tmp_path, verify_every_steps=3, checkpoint_every_steps=0)
    assert result["step"] == STEPS and result["weights_sha256"] == tiny_run[1]["weights_sha256"]
    assert result["skipped_steps"] == 0


def test_flips_of_other_steps_and_towers_are_not_seen(tmp_path, inject_flip, monkeypatch):
    inject_flip(1, {1, 2, 3, 5})
    traces, finish = [], trainer.finish

    def counted(step, each):
        traces.append(each.step_runner.train_step.experimental_get_tracing_count())
        return finish(step, each)

    monkeypatch.setattr(trainer, "finish", counted)
    result = run(TINY, tmp_path, num_gpus=2, verify_every_steps=2, max_steps=6, eval_every_epochs=0)
    assert result["step"] == 6 and traces == [4]  # ordinary, verified, and the repetitions by each tower


def test_bytes_of_verified_steps_are_not_kept_until_the_end_of_the_epoch(tmp_path, monkeypatch):
    kept, still_there, log_step = [], [], RunLogger.log_step

    def watched(logger, step, metrics, *others):
        log_step(logger, step, metrics, *others)
        kept.append(weakref.ref(metrics.original))
        still_there.append(kept[0]() is not None)

    monkeypatch.setattr(RunLogger, "log_step", watched)
    run(TINY, tmp_path, num_gpus=2, verify_every_steps=1, max_steps=4, eval_every_epochs=0)
    assert still_there == [True, False, False, False]


def test_one_tower_repeats_its_own_work_and_says_so(tmp_path, inject_flip, caplog):
    inject_flip(0, {3})
    with caplog.at_level(logging.INFO), pytest.raises(CorruptedError, match="step 3 .* of tower_0 .* if tower_0 "):
        run(TINY, tmp_path, num_gpus=1, verify_every_steps=1)
    assert caplog.text.count("one tower repeats its own work") == 1


@pytest.mark.parametrize(
    ("names", "settings", "refused"),
    [
        (["A100", "A100"], {"deterministic": True}, False),
        (["A100", "A100"], {}, True),
        (["A100", "T4"], {"deterministic": True}, True),
        (["A100", "T4"], {"verify_every_steps": 0}, False),
    ],
)
def test_gpus_must_be_deterministic_and_of_one_kind(monkeypatch, names, settings, refused):
    monkeypatch.setattr(devices, "setup_towers", lambda *_: [Tower(index, f"/GPU:{index}") for index in range(2)])
    monkeypatch.setattr(devices, "gpu_names", lambda: names)
    config = replace(TINY, **{"verify_every_steps": 5} | settings)
    if refused:
        with pytest.raises(UsageError, match="verify_every_steps .*--deterministic and GPUs of one kind"):
            devices.setup_devices(config)
    else:
        assert len(devices.setup_devices(config).towers) == 2
