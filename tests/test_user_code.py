"""Names of a user's functions are checked without executing any code; functions are loaded with errors of one line."""

import importlib
import os
import sys
from contextlib import nullcontext

import pytest

from cifar_towers.errors import UsageError
from cifar_towers.user_code import as_usage_errors, check_function, forget_files, load_function

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
    check_function("model", f"{source}:{name}")
    check_function("model", f"{source.replace('nets', 'star')}:{name}")
    check_function(
        "model", f"{source.replace('nets', 'broken')}:{name}"
    )  # importing it says in which line it is broken


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
        check_function("model", model)
    assert message in str(caught.value)


def test_built_in_models_need_no_file():
    check_function("model", "speednet94")
    check_function("model", "")


def test_an_error_in_a_notebook_has_the_line_of_its_cell():
    code = compile("def f():\n    raise OSError('no')", "/tmp/ipykernel_12/3059.py", "exec")
    exec(code, names := {})
    with pytest.raises(UsageError, match="^callback f: notebook cell, line 2: OSError: no$"):  # noqa: SIM117
        with as_usage_errors("callback f"):
            names["f"]()


def test_functions_are_loaded_from_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text("import keras\n\ndef small():\n    return 3\n")
    (tmp_path / "broken.py").write_text("import keras\n\nraise OSError('no')\n")
    (tmp_path / "program.py").write_text("import sys\n\nsys.exit(0)\n")
    assert load_function("model", f"{tmp_path}/mynets.py:small")() == 3
    monkeypatch.chdir(tmp_path)
    assert load_function("model", "mynets:small")() == 3
    for name, message in (
        ("nowhere.py:small", "there is no file nowhere.py"),
        ("nosuchmodule:small", "nosuchmodule cannot be imported: ModuleNotFoundError"),
        ("mynets:large", "mynets has no function large; it has small"),
        ("broken.py:small", "broken.py cannot be imported: broken.py, line 3: OSError: no"),
        ("program.py:small", "program.py cannot be imported: program.py, line 3: SystemExit: 0"),
    ):
        with pytest.raises(UsageError, match=f"^model={name}: {message}"):
            load_function("model", name)


def test_a_module_that_has_changed_since_its_first_use_is_a_warning_until_it_is_reloaded(tmp_path, monkeypatch, caplog):
    file = tmp_path / "changing.py"
    file.write_text("def net():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("model", "changing:net")() == load_function("loss", "changing:net")() == 1
    file.write_text("def net():\n    return 22\n")
    forget_files()
    assert load_function("model", "changing:net")() == 1 and caplog.messages == [
        f"{file} has changed since a run first used it, and its old code runs unless it was reloaded; "
        "changing.py:function is read anew in each run"
    ]
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(sys.modules["changing"])
    assert load_function("model", "changing:net")() == 22 and len(caplog.messages) == 1


def test_a_file_imports_the_modules_beside_it_anew_in_each_run_and_not_in_its_functions(tmp_path):
    text = "from blocks import number\n\ndef net():\n    return number\n\ndef late():\n    import layers\n"
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "nets.py").write_text(text)
        (tmp_path / directory / "blocks.py").write_text(f"number = '{directory}'\n")
        (tmp_path / directory / "layers.py").touch()
        forget_files()
        assert load_function("model", f"{tmp_path}/{directory}/nets.py:net")() == directory
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for text in ("numbr = 1", "number = 'mended'"):
        (tmp_path / "b/blocks.py").write_text(text)
        os.utime(tmp_path / "b/blocks.py", ns=(0, len(text) * 10**9))
        forget_files()
        with pytest.raises(UsageError, match="cannot import name") if text == "numbr = 1" else nullcontext():
            assert load_function("model", f"{tmp_path}/link/nets.py:net")() == "mended"
    message = "nets.py, line 7: ModuleNotFoundError: No module named 'layers'; import it at the top of the file"
    with pytest.raises(UsageError, match=message), as_usage_errors("it fails"):
        load_function("model", f"{tmp_path}/b/nets.py:late")()


def test_settings_that_name_the_same_unchanged_file_share_its_module(tmp_path, monkeypatch):
    file, text = tmp_path / "mine.py", "state = []\n\ndef one():\n    return state\n\ndef other():\n    return state\n"
    file.write_text(text)
    (tmp_path / "link.py").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    one = load_function("loss", f"{file}:one")
    first = one()
    for setting, name in (("callback", "mine.py:other"), ("loss", "link.py:one"), ("model", "link.py:one")):
        assert load_function(setting, name)() is first
    assert load_function("model", "mine.py:one", shared=False)() is not first and one() is first
    second = load_function("model", "mine.py:one")()
    assert second is not first  # the layers of another model are new
    assert one() is second and load_function("callback", "mine.py:other")() is second
    file.write_text(text.replace("[]", "[1]"))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    assert load_function("loss", "mine.py:one")() == [1] and one() is second
    edited = load_function("callback", "mine.py:other")
    forget_files()
    assert load_function("callback", "mine.py:other")() is not edited()
