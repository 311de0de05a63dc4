import io

from rich.console import Console

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.console import Progress, Status


def shown(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    progress = Progress(RunLength(10, 20, 20), console)
    for step in range(1, 11):
        progress.step(Status(step, 2.0, 0.25, 0.1, 1234.5))
    progress.epoch(Status(10, 1.5, 0.5, 0.1, 1234.5), ["test 60.00 %"])
    return out.getvalue()


def test_a_pipe_gets_one_clean_line_an_epoch():
    text = shown(terminal=False)
    assert text.count("\n") == 1 and text[:-1].isprintable() and "\x1b" not in text and "\r" not in text
    assert "epoch  1.00/2.00  step 10/20  loss 1.5000  accuracy 50.00 %  rate 0.1  1,234 images/s" in text
    assert text.endswith("test 60.00 %\n")


def test_a_person_sees_a_line_that_moves():
    text = shown(terminal=True)
    assert "\x1b" in text and "step 10/20" in text


def test_what_matters_fits_on_a_narrow_terminal():
    for width, there, missing in (
        (200, ["rate", "step", "╺"], []),
        (80, ["images/s", "left", "accuracy"], ["rate", "…"]),
        (60, ["loss", "left"], ["rate", "step", "…"]),
    ):
        out = io.StringIO()
        progress = Progress(RunLength(390, 100_000, 100_000), Console(file=out, force_terminal=True, width=width))
        for step in (38_219, 38_220):
            progress.step(Status(step, 1.0722, 0.6234, 0.1, 1876.5))
        line = progress._line(Status(38_221, 1.0722, 0.6234, 0.1, 1876.5))
        assert len(line) <= width and all(part in line for part in there) and not any(part in line for part in missing)
        progress.pause()
