import io

import pytest
from rich.console import Console

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.console import Progress, ProgressStatus

STATUS = ProgressStatus(10, 1.5, 0.5, 0.1, 1234.5, 65.4, 8)
UNKNOWN = ProgressStatus(10, 1.5, 0.5, 0.1, None)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_gets_one_plain_line_per_epoch_and_a_terminal_a_live_line(terminal):
    out = io.StringIO()
    progress = Progress(
        RunLength(10, 20, 20),
        Console(file=out, force_terminal=terminal, width=200, highlight=False),
    )
    progress.activity("compiling")
    for step in range(1, 11):
        progress.step(ProgressStatus(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(STATUS)
    progress.epoch(UNKNOWN)
    text = out.getvalue()

    assert all(
        part in text
        for part in ("1.00/2.00", "1.5000", "50.00 %", "1,234 ", "0:01:05", "step 8", " - images")
    )
    assert ("\x1b" in text) == ("2.0000" in text) == terminal
    assert terminal or (text.count("\n") == 2 and text.replace("\n", "").isprintable())


def test_a_notebook_has_no_escape_codes(monkeypatch, capsys):
    """Its kernel sets FORCE_COLOR, with which rich writes as to a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(RunLength(10, 20, 20))
    progress.step(STATUS)
    progress.epoch(STATUS)
    written = capsys.readouterr().out

    assert "\x1b" not in written
    assert written.count("\n") == 1


def test_an_ascii_terminal_and_a_closed_one_do_not_end_a_run(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", out)
    progress = Progress(RunLength(10, 20, 20))
    progress.log("runs/\u00e9t\u00e9")
    assert out.buffer.getvalue() == b"runs/\\xe9t\\xe9\n"
    out.close()
    progress.log("nobody reads this")
