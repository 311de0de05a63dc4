import io
import re
import sys

import pytest
from rich.console import Console

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting import console
from cifar_towers.reporting.console import Progress, ProgressStatus, format_estimate, progress_bar

STATUS = ProgressStatus(10, 1.5, 0.5, 0.1, 1234.5, 65.4, 8)


@pytest.mark.parametrize("terminal", [False, True])
def test_pipe_gets_one_plain_line_per_epoch_and_a_terminal_a_live_line(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    progress = Progress(RunLength(10, 20, 20), console)
    progress.activity("compiling")
    for step in range(1, 11):
        progress.step(ProgressStatus(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(STATUS)
    text = out.getvalue()
    assert "epoch 1.00/2.00  loss 1.5000  accuracy 50.00 %   1,234 images/s     1:05 left  saved step 8" in text
    if terminal:
        assert "\x1b" in text
    else:
        assert text.count("\n") == 1 and text[:-1].isprintable() and "\x1b" not in text and "\r" not in text


def test_time_left_is_no_more_exact_than_it_is_known():
    """An estimate may be wrong by 15 percent; seconds are shown only of less than ten minutes."""
    shown = {65.4: "1:05", 599: "9:59", 600: "10 min", 2047: "34 min", 3570: "60 min", 3600: "1.0 h", 45_000: "12.5 h"}
    assert {seconds: format_estimate(seconds) for seconds in shown} == shown


def test_slow_training_shows_a_decimal_of_its_rate():
    """A CPU takes that long for resnet110 on images of 256 pixels."""
    out = io.StringIO()
    Progress(RunLength(10, 20, 20), Console(file=out, soft_wrap=True)).epoch(ProgressStatus(10, 1.5, 0.5, 0.1, 0.42))
    assert " 0.4 images/s" in out.getvalue()


@pytest.mark.parametrize("length", [RunLength(48, 464, 464), RunLength(390, 100_000, 100_000)])
def test_epoch_lines_are_of_one_layout(length):
    """Whatever the step, the speed and the time left; no longer than 100 characters, and with the save."""
    out = io.StringIO()
    progress = Progress(length, Console(file=out, soft_wrap=True))
    for step, speed, left in ((48, 56.0, 7264.0), (390, 1876.5, 65.0), (length.last - 1, 21_345.6, 3.0)):
        progress.epoch(ProgressStatus(step, 1.0722, 0.6234, 0.1, speed, left, step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 100
    assert len({tuple(map(line.index, ("loss", " images/s", " left", "saved"))) for line in lines}) == 1


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (200, ["rate", "step", "╺", "saved step 38217"], []),
        (80, ["images/s", "left", "accuracy"], ["rate", "saved", "…"]),
        (60, ["loss", "left"], ["rate", "step", "…"]),
    ],
)
def test_live_line_fits_the_terminal(width, shown, left_out):
    progress = Progress(RunLength(390, 100_000, 100_000), Console(file=io.StringIO(), width=width))
    line = progress._step_line(ProgressStatus(38_221, 1.0722, 0.6234, 0.1, 1876.5, 3725, 38_217))
    unknown = progress._step_line(ProgressStatus(1, 1.0, 0.5, 0.1, None))
    assert "images/s" not in unknown
    assert len(line) <= width and all(part in line for part in shown) and not any(part in line for part in left_out)


def test_live_line_shows_what_is_done_between_steps():
    progress = Progress(RunLength(390, 100_000, 100_000), Console(file=io.StringIO(), force_terminal=True))
    progress.activity("compiling")
    assert progress._live_text() == "compiling ... 0 s"
    progress.activity("evaluating", 0.5)
    assert progress._live_text() == "━" * 10 + "╺" * 10 + " evaluating"
    progress.pause()


def test_a_notebook_has_one_line_that_each_step_overwrites(monkeypatch, capsys):
    """Its kernel sets FORCE_COLOR, with which rich writes as to a terminal."""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(console, "NOTEBOOK_SECONDS", -1)
    progress = Progress(RunLength(10, 20, 20))
    for step in range(1, 11):
        progress.step(ProgressStatus(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(STATUS)
    written = capsys.readouterr().out
    assert "\x1b" not in written and written.count("step 10/20") == 1
    shown = re.sub(r"[^\n]*\r(?=[^\n])", "", written)
    assert shown.startswith("epoch 1.00/2.00  loss 1.5000") and shown.count("\n") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bar_of_a_task_is_shown_on_terminals_alone_and_leaves_standard_output_as_it_is(
    is_terminal, monkeypatch, capsys
):
    errors = io.StringIO()
    errors.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", errors)
    with progress_bar("evaluating") as show:
        show(0.25)
        print("result")
    assert capsys.readouterr().out == "result\n"
    assert ("evaluating" in errors.getvalue() and "25%" in errors.getvalue()) == is_terminal
    assert bool(errors.getvalue()) == is_terminal
