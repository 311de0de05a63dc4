"""What the fault trials know of the program's internals holds: every part is called in a run, and
every message is printed.
"""

import re
import signal
from collections import Counter

import pytest

from cifar_towers.data import synthetic
from cifar_towers.errors import Interrupted
from tests.faults import hooks, nan_injection, runs
from tests.helpers.programs import call

STEPS = 6
FLAGS = [*runs.FLAGS, "--brightness=1e-30", f"--max_steps={STEPS}", "--eval_every_epochs=0.1"]


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of every part; what the trials change in this process is undone at the
    end.
    """
    counted = Counter()
    monkeypatch.setattr(synthetic, "load", hooks.small_data)
    for part, (owner, name) in hooks.PARTS.items():
        monkeypatch.setattr(owner, name, getattr(owner, name))
        hooks.before(part, lambda *_, part=part, **__: counted.update([part]))
    return counted


def test_every_part_is_called_and_every_message_is_printed(tmp_path, monkeypatch, calls, capsys):
    def train():
        return call(monkeypatch, "train", *FLAGS, f"--train_dir={tmp_path}")

    def stop(*_, **__):
        if calls["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    hooks.before("step", stop)
    nan_injection.INJECTORS["input"](1, [2], float("nan"))
    with pytest.raises(Interrupted) as interrupted:
        train()
    (saved,) = hooks.SAVED.findall(str(interrupted.value))

    assert int(saved) >= 3

    output = capsys.readouterr().out
    assert hooks.STARTED in output

    skipped = re.search(hooks.SKIPPED.format(2), output)
    assert "tower_1" in skipped[0]

    assert train() == 0
    assert hooks.RESUMED.search(capsys.readouterr().out)[1] == saved
    assert calls["loading"] == calls["loop"] == 2
    assert calls["update"] == calls["step"] == STEPS
    assert calls["averaging"] >= 2  # once a trace
    assert calls["progress"] >= STEPS
    assert calls["evaluation"] == 3  # after steps 2 and 4, and at the end
    assert calls["save"] >= 2
