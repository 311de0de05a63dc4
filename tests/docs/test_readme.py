"""README, CONTRIBUTING, docs/ and docstrings are correct: examples, flags, commands, links."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from cifar_towers.cli.main import PROGRAMS
from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import flag_settings, recipe_flagfile, recipe_names
from scripts import settings_page
from tests.helpers.messages import assert_prints_the_same

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LOG = sorted((ROOT / "docs/log").glob("*.md"))
README = FILES[0].read_text()
PAGES = "".join(path.read_text() for path in FILES)
# flags of sbatch, tensorboard, TensorFlow and Docker, to a hyphen; then those of two programs
OTHERS = {"job", "logdir", "tf_xla_persistent_cache_directory", "init"}
for program in ("scripts/benchmark.py", "tests/faults/__main__.py"):
    OTHERS |= set(re.findall(r'"--(\w+)"', (ROOT / program).read_text()))
CONFIGS = {name: config_class for name, (_, config_class) in PROGRAMS.items()}

MODULES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "cifar_towers").rglob("*.py"))
    if ">>> " in path.read_text()
]
EXAMPLES = re.findall(r"```python\n(.*?)```", README + (ROOT / "docs/towers.md").read_text(), re.S)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=pytest.mark.slow if "import numpy" in code else ())
        for code in EXAMPLES
    ],
)
def test_examples_print_their_comments(code, capsys):
    """A block prints the comments at its end, numbers to 0.1 %; one and two towers train the
    perceptron equally.
    """
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    comments = [line for line in code.splitlines() if line.startswith("# ")]
    expected = "\n".join(comment.removeprefix("# ") for comment in comments)

    assert_prints_the_same(printed, expected, rel=1e-3)

    if "41,157,101" in code:
        one, two = printed.splitlines()
        assert one.split(":")[1] == two.split(":")[1]


@pytest.mark.parametrize("recipe", recipe_names())
def test_readme_has_what_the_recipes_were_measured_to_reach(recipe):
    row = "".join(re.findall(rf"^\| `{recipe}`.*", README, re.M))
    (claim,) = re.findall(r"^# Measured: (.*)$", recipe_flagfile(recipe).read_text(), re.M) or [""]
    measured = re.findall(r"[\d.]+ %", claim)
    assert bool(row) == bool(measured)
    for accuracy in measured:
        assert accuracy.removesuffix(" %") in row


def test_the_page_of_settings_is_that_of_the_program():
    """If not, `make docs` writes it."""
    page = (ROOT / "docs/settings.md").read_text()
    assert page.splitlines() == list(settings_page.page_lines())


def test_the_map_names_every_folder_of_the_package():
    table = re.findall(r"^\| (`cifar_towers/.*?) \|", FILES[1].read_text(), re.M)
    named = set()
    for cell in table:
        named |= set(re.findall(r"`(?:cifar_towers/)?([\w.]+)/?`", cell))
    folders = {path.parent.name for path in (ROOT / "cifar_towers").glob("*/__init__.py")}
    assert folders <= named
    assert all((ROOT / "cifar_towers" / name).exists() for name in named)


def test_readme_shows_the_step_as_it_is():
    (shown,) = re.findall(r"```\n(shards = .*?)```", README, re.S)
    step = (ROOT / "cifar_towers/training/step.py").read_text()
    assert "average_gradients(" in shown
    assert all(f" {line}\n" in step for line in shown.splitlines())


def test_no_figure_stands_on_two_pages():
    """Accuracies in % and rates in images/s; a page links to the one that states it."""
    pages = {}
    for page in FILES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for figure in set(re.findall(r"\b\d\d\.\d+ %|[\d,]+ images/s", text)):
            pages.setdefault(figure, []).append(page.name)
    assert {figure: names for figure, names in pages.items() if len(names) > 1} == {}


def unknown_flags(text, *config_classes):
    known = {"flagfile", "help", "helpfull"}
    for config_class in config_classes:
        known |= {field.name for field in flag_settings(config_class)}
    given = set(re.findall(r"--([a-z][a-z0-9_]+)", text))
    return {flag for flag in given if flag not in known and flag.removeprefix("no") not in known}


def test_flags_make_targets_and_files_exist():
    assert unknown_flags(PAGES, *CONFIGS.values()) <= OTHERS
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", PAGES, re.M)) <= targets
    for path in re.findall(r"\b(?:cifar_towers|configs|scripts|docs|tests)/[\w/.-]*\w", PAGES):
        assert (ROOT / path).exists(), path


def test_commands_use_flags_of_their_program():
    # $(...) inside another, too
    commands = re.findall(rf"cifar-towers ({'|'.join(CONFIGS)})\b(?=([^`#\n]*))", PAGES)
    assert {name for name, _ in commands} == set(CONFIGS)
    for name, arguments in commands:
        own, _, of_train = re.sub(r"\$\([^)]*\)", "", arguments).partition(" -- ")
        unknown = unknown_flags(own, CONFIGS[name]) | unknown_flags(of_train, TrainConfig)
        assert unknown == set(), name


def anchor_of(title):
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


@pytest.mark.parametrize("page", FILES + LOG, ids=lambda path: path.name)
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in {anchor_of(title) for title in titles}, link


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_docstring_examples(path):
    results = doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts)))
    assert results.attempted
    assert not results.failed
