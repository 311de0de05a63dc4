import io

import pytest
from rich.console import Console

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.console import Progress, ProgressStatus

STATUS = ProgressStatus(10, 1.5, 0.5, 0.1, 1234.5, 65.4, 8)


@pytest.mark.parametrize("terminal", [False, True])
def test_pipe_gets_one_plain_line_per_epoch_and_a_terminal_a_live_line(terminal):
    out = io.StringIO()
    progress = Progress(RunLength(10, 20, 20), Console(file=out, force_terminal=terminal, width=200, highlight=False))
    progress.activity("compiling")
    for step in range(1, 11):
        progress.step(ProgressStatus(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(STATUS)
    text = out.getvalue()
    assert "epoch 1.00/2.00  loss 1.5000  accuracy 50.00 %   1,234 images/s   0:01:05 left  saved step 8" in text
    if terminal:
        assert "\x1b" in text and "epoch 1.00/2.00  loss 2.0000" in text
    else:
        assert text.count("\n") == 1 and text[:-1].isprintable() and "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize("length", [RunLength(48, 464, 464), RunLength(390, 100_000, 100_000)])
def test_epoch_lines_are_of_one_layout(length):
    """Whatever the step, the speed and the time left; no longer than 100 characters, and with the save."""
    out = io.StringIO()
    progress = Progress(length, Console(file=out, soft_wrap=True))
    times = ((48, 56.0, 7264.0), (390, 0.42, 65.0), (length.last - 1, 21_345.6, 3.0), (1, None, None))
    for step, speed, left in times:
        progress.epoch(ProgressStatus(step, 1.0722, 0.6234, 0.1, speed, left, step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 100 and " 0.4 images/s" in lines[1]
    assert len({tuple(map(line.index, ("loss", " images/s", " left", "saved"))) for line in lines}) == 1


def test_a_notebook_has_no_escape_codes(monkeypatch, capsys):
    """Its kernel sets FORCE_COLOR, with which rich writes as to a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(RunLength(10, 20, 20))
    progress.step(STATUS)
    progress.epoch(STATUS)
    written = capsys.readouterr().out
    assert "\x1b" not in written and written.count("\n") == 1
