"""docs/tracking.md: its table of metrics, and its callbacks."""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import cifar_towers
from cifar_towers.evaluation.score import Score
from cifar_towers.reporting.run_logger import Callbacks, RunLogger, evaluation_record
from tests.runs.short_runs import records_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tracking.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def documented_keys(title):
    """Return {key: name in a callback} of a table; an empty name if callbacks do not get it."""
    lines = PAGE.split(f"### {title}\n")[1].split("###")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines if line.startswith("| `")]
    return {key: name for _, key, name, *_ in rows}


TRAINING, EVALUATION = documented_keys("Training records"), documented_keys("Evaluation records")


def keys_in(record):
    nested = {f"towers.{name}" for name in record.get("towers", {})}
    return (record.keys() - {"towers"}) | nested


def literal_keys(function):
    """Return the keys that a function's source gives to dictionaries and to records that it writes."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    keys = {key for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    keys |= {node.slice for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.metrics.write"]
    written = {keyword.arg for call in calls for keyword in call.keywords} - {None}
    return written | {key.value for key in keys if isinstance(key, ast.Constant)}


EVALUATION_KEYS = literal_keys(evaluation_record) | literal_keys(Score.record)


def test_every_key_of_the_records_is_documented_and_no_other(tiny_run):
    train, evaluations = records_of(tiny_run[0], "train"), records_of(tiny_run[0], "eval")
    assert set().union(*map(keys_in, train)) == TRAINING.keys()
    assert set().union(*map(keys_in, evaluations)) == EVALUATION.keys()
    source = inspect.getsource(sys.modules[RunLogger.__module__])
    assert source.count("metrics.write(") == source.count("self.metrics.write(kind=") == 2
    written = literal_keys(RunLogger.log_step)
    assert {key for key in written if "/" not in key} == {key.removeprefix("towers.") for key in TRAINING} | {"towers"}
    assert literal_keys(RunLogger.log_evaluation) | EVALUATION_KEYS == EVALUATION.keys()


def test_callbacks_get_the_documented_names(tiny_run):
    steps = []
    *_, record = records_of(tiny_run[0], "train")
    Callbacks([lambda step, metrics: steps.append(metrics)]).step(record["step"], record)
    names = {name for name in TRAINING.values() if name}
    assert steps[0].keys() == names | {name.replace("tower_0", "tower_1") for name in names}
    assert steps[0]["tower_1/cosine"] == record["towers"]["cosine"][1]
    assert {name for name in EVALUATION.values() if name} == EVALUATION_KEYS


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_examples_log_the_loss_of_each_step(monkeypatch, code):
    def train(recipe, callbacks):
        callbacks[0](3, {"loss": 2.5})

    tracker = MagicMock()
    name = re.match(r"import cifar_towers, (\w+)", code)[1]
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.setattr(cifar_towers, "train", train)
    exec(code, {})
    assert any(call.args == ({"loss": 2.5}, 3) for call in tracker.mock_calls)
