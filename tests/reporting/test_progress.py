import io

from rich.console import Console

from cifar_towers.reporting.progress import Progress, Status
from cifar_towers.training.schedules import Length


def shown(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    progress = Progress(Length(10, 20, 20), console)
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
