"""Names of a user's models are checked without executing any code."""

import sys

import pytest

from cifar_towers.errors import UsageError
from cifar_towers.registry import check_user_model

NETS = """
import os; os.abort()
from elsewhere import imported
assigned = lambda: 1
if True:
    def make(): pass
    class Net: pass
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import os; os.abort()")
    for name, text in {"nets": NETS, "star": "from elsewhere import *", "broken": "def make(:"}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("source", ["package/nets.py", "package.nets"])
@pytest.mark.parametrize("name", ["make", "Net", "assigned", "imported"])
def test_whatever_a_file_or_module_may_define_is_accepted(nets, source, name):
    check_user_model(f"{source}:{name}")
    check_user_model(f"{source.replace('nets', 'star')}:{name}")
    check_user_model(f"{source.replace('nets', 'broken')}:{name}")  # importing it says in which line it is broken


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("package/nets.py:mak", "package/nets.py has no function mak; did you mean make? it has Net, make"),
        ("package.nets:other", "package.nets has no function other"),
        ("package/nowhere.py:make", "there is no file package/nowhere.py"),
        ("package.nowhere:make", "there is no module package.nowhere"),
        ("nowhere.nets:make", "there is no module nowhere.nets"),
    ],
)
def test_a_missing_file_module_or_function_is_named(nets, model, message):
    with pytest.raises(UsageError) as caught:
        check_user_model(model)
    assert message in str(caught.value)


def test_built_in_models_need_no_file():
    check_user_model("speednet94")
    check_user_model("")
