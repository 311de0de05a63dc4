"""The commands of docs/: parsed with their files at hand, and run if quick."""

import builtins
import glob
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cifar_towers.cli.main import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources, synthetic
from tests.own_data import write_arrays
from tests.programs import call
from tests.runs import short_runs
from tests.test_makefile import make
from tests.test_readme import CONFIGS

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("training", "your-own", "inference")}
BLOCKS = [block for page in PAGES.values() for block in re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if re.match("(cifar-towers|make) ", line)]
TRAINED = [line for line in COMMANDS if re.search(r"-towers train .*((mine|mixup)\.py|photos|labels|arrays|init_from)", line)]
OWN_NET = [line for line in COMMANDS if re.search(r"mobilenet\.py", line)]  # train, predict, evaluate
USES = r"^(cifar-towers|make) (evaluate|predict|runs)\b(?!.*(cifar10_|mobilenet))"  # no download, no large net
USED = [line for line in COMMANDS if re.search(USES, line)]
EXPORTS = [line for line in COMMANDS if re.search("^(cifar-towers|make) export", line)]
ONE_STEP = ["--max_steps=1", "--tta=0", "--precision=float32"]


def python_block(name):
    (block,) = (block for block in BLOCKS if f"def {name}(" in block)
    return block


@pytest.fixture(scope="module")
def work(tmp_path_factory, small_folder):
    """Make a directory with the files that the commands name, except `runs/`."""
    place = tmp_path_factory.mktemp("work")
    (place / "mypackage").mkdir()
    shutil.copytree(ROOT / "examples", place / "examples")
    shutil.copy(ROOT / "examples/mobilenet.py", place / "mypackage/nets.py")
    (place / "mine.py").write_text(python_block("brier"))
    (place / "mine.cfg").write_text("--model=speednet93\n--epochs=1\n")
    photos = shutil.copytree(small_folder.removeprefix("folder:"), place / "photos")
    pictures = sorted(photos.glob("*/*/*.png"))
    rows = [f"{path.relative_to(photos)},{path.parts[-2]},{path.parts[-3]}" for path in pictures]
    (place / "labels.csv").write_text("\n".join(["file,label,split", *(f"photos/{row}" for row in rows)]))
    shutil.copytree(photos, place / "elsewhere/photos")
    shutil.copytree(photos / "test", place / "newphotos/test")
    write_arrays(place, train=synthetic.make(160, 0, 0), test=synthetic.make(40, 0, 1))
    (place / "folder").mkdir()
    for path in ("picture.jpg", "a.png", "folder/b.png"):
        Image.open(pictures[0]).save(place / path)
    (place / "cifar-10-batches-py").mkdir()
    (place / "cifar-10-batches-py/data_batch_1").touch()
    return place


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    return work


def train(*flags):
    with short_runs.small_runs() as patch:
        call(patch, "train", *flags, *ONE_STEP)


def make_runs(work, *flags):
    """Train a run of the recipe `speed94` for a step, and copy it to the places that the commands name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        shutil.rmtree("runs", ignore_errors=True)
        train("--dataset=folder:photos", "--batch_size=128", "--num_gpus=1", "--train_dir=runs/speed94-seed0", *flags)
        for name in ("speed94-seed3", "speed94-photos-seed0"):
            shutil.copytree("runs/speed94-seed0", f"runs/{name}")


@pytest.fixture(scope="module")
def small_runs(work):
    """Train the recipe with a net that compiles quickly."""
    small = [
        "--model=cifarnet",
        "--crop=24",
        "--shift=0",
        "--image_size_schedule=",
        "--optimizer=momentum",
        "--learning_rate=0.1",
    ]
    make_runs(work, "--recipe=speed94", *small, "--bias_learning_rate=0", "--head_learning_rate=0")


@pytest.fixture(scope="module")
def speed94_runs(work):
    make_runs(work, "--recipe=speed94")


def words_of(command):
    """Return program and arguments of a command, as a shell passes them on; `make` says what it would start."""
    command = re.sub(r"\$\(.*\)", "runs/speed94-seed0", command)
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        words = shlex.split(make("--dry-run", *words[1:]).splitlines()[-1])
    return [path for word in words[1:] for path in (sorted(glob.glob(word)) or [word])]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted_by_its_program(command, here):
    """Its flags, their values, functions and data exist; nothing is trained."""
    program, *flags = words_of(command)
    config_class = CONFIGS[program]
    if flags == ["--help"]:
        with pytest.raises(SystemExit, match="^0$"):
            parse_command_line(config_class, flags)
        return
    config = parse_command_line(config_class, flags)
    if config_class is TrainConfig and ":" in config.dataset:
        sources.find(config.dataset, config.data_dir)
    if config_class is TrainConfig and config.data_dir:
        assert sources.find("cifar10", config.data_dir)


def run(command, *more):
    program, *arguments = words_of(command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", lambda question: "n")
        assert call(patch, program, *arguments, *more) == 0


@pytest.mark.parametrize("command", USED)
def test_command_uses_a_run(command, small_runs, here, capsys):
    run(command)
    out = capsys.readouterr().out
    if "evaluate" in command and "--json" not in command:
        assert re.search(r"\(\d+ of 40; 95 % interval", out) and "most often taken for" in out
    elif "evaluate" in command:
        assert json.loads(out)["count"] == 40
    elif "predict" in command and "--json" in command:
        (answer,) = map(json.loads, out.splitlines())
        assert answer["probabilities"][answer["class"]] == max(answer["probabilities"].values())
    elif "predict" in command:
        assert [line.count(" %") for line in out.splitlines()] == [3] * (3 if "*.png" in command else 1)
    else:
        assert "speed94-seed3" in out


def test_predictions_become_a_table(small_runs, here, capsys):
    (command,) = (command for command in USED if "predict" in command and "--json" in command)
    run(command)
    out = capsys.readouterr().out
    Path("predictions.jsonl").write_text(out)
    answer = json.loads(out)
    (block,) = (block for block in BLOCKS if "submission.csv" in block)
    exec(compile(block, "inference.md", "exec"), {})
    assert Path("submission.csv").read_text().splitlines() == ["id,label", f"b,{answer['class']}"]
    assert answer.keys() == {"picture", "class", "probabilities"} and len(answer["probabilities"]) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINED)
def test_command_trains_a_step(command, speed94_runs, here, tmp_path):
    data = [] if "--dataset=" in command else ["--dataset=folder:photos", "--batch_size=128"]
    run(command, *ONE_STEP, *data, f"--train_dir={tmp_path}")
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 1


@pytest.mark.slow
def test_commands_train_and_use_a_net(here, capsys):
    train, *uses = OWN_NET
    run(train, *ONE_STEP, "--dataset=folder:photos", "--batch_size=40", "--train_dir=runs/net-seed0")
    for command in uses:
        run(command)
    assert len(uses) == 2 and "most often taken for" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", EXPORTS)
def test_command_exports_a_run(command, speed94_runs, here, capsys):
    run(command)
    assert "on 40 test images the largest difference of a probability is" in capsys.readouterr().out
