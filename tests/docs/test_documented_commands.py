"""The commands of README and docs/: parsed with their files at hand, and run if quick."""

import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from cifar_towers.data import sources, synthetic
from tests.docs.test_readme import CONFIGS
from tests.helpers import short_runs
from tests.helpers.programs import call, make
from tests.helpers.user_data import write_arrays, write_folder, write_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = []
for page in PAGES:
    BLOCKS += re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M)
COMMANDS = []
for block in BLOCKS:
    COMMANDS += [
        line for line in block.splitlines() if re.match(r"cifar-towers \w|make train", line)
    ]

# no download, no large net
USES = r"^cifar-towers (evaluate|predict|runs|export|report)\b(?!.*(cifar10_|mobilenet|runs/plain))"
USED = [line for line in COMMANDS if re.search(USES, line)]
TRAINS = (
    r"^cifar-towers train (?!.*(cifar100|mobilenet|mypackage|profile|runs/plain|runs/lower|help))"
)
TRAINED = [line for line in COMMANDS if re.search(TRAINS, line)]
OWN_NET = [line for line in COMMANDS if "--num_gpus=2" in line and "mobilenet" in line]
OWN_NET += [line for line in COMMANDS if "--train_dir=runs/net-seed0" in line]
ONE_STEP = ["--max_steps=1", "--notta", "--precision=float32"]
PHOTOS = ["--dataset=folder:photos", "--batch_size=128"]
SMALL = [  # in place of the recipe's net, one that compiles quickly
    "--model=cifarnet",
    "--crop=24",
    "--shift=0",
    "--image_size_schedule=",
    "--optimizer=momentum",
    "--learning_rate=0.1",
    "--bias_learning_rate=0",
    "--head_learning_rate=0",
]


def block_with(text):
    matching = [block for block in BLOCKS if text in block]
    (block,) = matching
    return block


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Make a directory with the files that the commands name, except `runs/`."""
    place = tmp_path_factory.mktemp("work")
    shutil.copytree(ROOT / "examples", place / "examples")
    for folder in ("mypackage", "folder"):
        (place / folder).mkdir()
    shutil.copy(ROOT / "examples/mobilenet.py", place / "mypackage/nets.py")
    (place / "mine.py").write_text(block_with("def brier("))
    (place / "mine.cfg").write_text("--model=speednet93\n--epochs=1\n")
    splits = {"train": synthetic.make(160, 0, 0), "test": synthetic.make(40, 0, 1)}
    for where in ("photos", "elsewhere/photos"):
        write_folder(place / where, **splits)
    write_folder(place / "newphotos", test=splits["test"])
    write_table(place, **splits)
    write_arrays(place, **splits)
    for path in ("picture.jpg", "a.png", "folder/b.png"):
        Image.fromarray(splits["test"].images[0]).save(place / path)
    return place


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    return work


@pytest.fixture(scope="module")
def runs(work):
    """Train a run for a step, and copy it to the places that the commands name."""
    with short_runs.small_runs() as patch:
        patch.chdir(work)
        flags = [*PHOTOS, *SMALL, *ONE_STEP, "--num_gpus=1", "--train_dir=runs/speed94-seed0"]
        call(patch, "train", "--recipe=speed94", *flags)
        for name in ("speed94-seed3", "speed94-photos-seed0"):
            shutil.copytree("runs/speed94-seed0", f"runs/{name}")


def words_of(command):
    """Return program and arguments of a command, as a shell passes them on; `make` says what it
    would start.
    """
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        words = shlex.split(make("--dry-run", *words[1:]).splitlines()[-1])

    expanded = []
    for word in words[1:]:
        expanded += sorted(glob.glob(word)) or [word]
    return expanded


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


def run(command, *more):
    program, *arguments = words_of(command)
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, program, *arguments, *more) == 0


@pytest.mark.parametrize("command", USED)
def test_command_uses_a_run(command, runs, here, capsys):
    shutil.rmtree("runs/speed94-seed0/export", ignore_errors=True)  # two pages export
    run(command)
    out = capsys.readouterr().out
    assert json.loads(out) if "--json" in command else out


@pytest.mark.slow
def test_example_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block_with("callbacks=[follow]"), "python.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINED)
def test_command_trains_a_step(command, runs, here, tmp_path):
    data = [] if "--dataset=" in command else PHOTOS
    run(command, *SMALL, *ONE_STEP, *data, f"--train_dir={tmp_path}")
    results = list(tmp_path.rglob("result.json"))
    assert len(results) == (3 if "--seeds=0,1,2" in command else 1)
    for result in results:
        assert json.loads(result.read_text())["step"] == 1


@pytest.mark.slow
def test_commands_compare_two_settings(here, capsys):
    *train, runs, report, plot = block_with("runs/lower").splitlines()
    small = [flag for flag in SMALL if "--learning_rate" not in flag]
    for command in train:
        run(command, *small, *ONE_STEP, *PHOTOS, "--validation_examples=20")
    capsys.readouterr()
    run(runs)
    printed = capsys.readouterr().out
    assert printed.count("(n=3)") == 4  # two settings on two splits
    assert re.search("lower - plain: .*; validation$", printed, re.M)
    run(report)
    assert "lower" in Path("report.html").read_text()

    _, script, *directories = shlex.split(plot)
    subprocess.run([sys.executable, ROOT / script, *directories], check=True)
    assert Path("accuracy.png").is_file()


@pytest.mark.slow
def test_command_profiles_steps(here):
    (command,) = [line for line in COMMANDS if "--profile_steps" in line]
    run(command, *SMALL, *PHOTOS, "--epochs=150", "--notta")
    assert list(Path("runs/profile/train").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_command_launches_workers(here):
    (command,) = [line for line in COMMANDS if "--num_workers=2" in line]
    run(command, *SMALL, *ONE_STEP, *PHOTOS)
    assert json.loads(Path("runs/two-workers/result.json").read_text())["step"] == 1


@pytest.mark.slow
def test_commands_train_and_use_a_net(here):
    train, *uses = OWN_NET
    run(train, *ONE_STEP, *PHOTOS, "--train_dir=runs/net-seed0")
    assert len(uses) == 2
    for command in uses:
        run(command)
