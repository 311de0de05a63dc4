import io

import pytest
from rich.console import Console

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.console import Progress, ProgressStatus


@pytest.mark.parametrize("terminal", [False, True])
def test_pipe_gets_one_plain_line_per_epoch_and_a_terminal_a_live_line(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    progress = Progress(RunLength(10, 20, 20), console)
    for step in range(1, 11):
        progress.step(ProgressStatus(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(ProgressStatus(10, 1.5, 0.5, 0.1, 1234.5), ["test 60.00 %"])
    text = out.getvalue()
    assert "epoch  1.00/2.00  step 10/20  loss 1.5000  accuracy 50.00 %  rate 0.1  1,234 images/s" in text
    assert text.endswith("test 60.00 %\n")
    if terminal:
        assert "\x1b" in text
    else:
        assert text.count("\n") == 1 and text[:-1].isprintable() and "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (200, ["rate", "step", "╺"], []),
        (80, ["images/s", "left", "accuracy"], ["rate", "…"]),
        (60, ["loss", "left"], ["rate", "step", "…"]),
    ],
)
def test_live_line_fits_the_terminal(width, shown, left_out):
    out = io.StringIO()
    progress = Progress(RunLength(390, 100_000, 100_000), Console(file=out, force_terminal=True, width=width))
    for step in (38_219, 38_220):
        progress.step(ProgressStatus(step, 1.0722, 0.6234, 0.1, 1876.5))
    line = progress._live_line(ProgressStatus(38_221, 1.0722, 0.6234, 0.1, 1876.5))
    progress.pause()
    assert len(line) <= width and all(part in line for part in shown) and not any(part in line for part in left_out)
