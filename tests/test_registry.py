"""Functions of the user's own are found without executing their file, and imported from files and
modules.
"""

import sys
import types

import pytest

from cifar_towers.errors import UsageError
from cifar_towers.registry import code_digests, find_source, is_unchanged, load_function

NETS = "from blocks import number\n\nleft_out = 3\n\ndef make():\n    return number\n"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Two files of one name, each with a helper of its own beside it, and a package in the current
    directory.
    """
    monkeypatch.chdir(tmp_path)
    for place in ("a", "usercode_package"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "__init__.py").touch()
        (tmp_path / place / "nets.py").write_text(
            NETS.replace("from blocks import number", f"number = '{place}'")
        )
    (tmp_path / "b").mkdir()
    (tmp_path / "b/nets.py").write_text(NETS.replace("blocks", "usercode_blocks"))
    (tmp_path / "b/usercode_blocks.py").write_text("number = 'b'\n")
    (tmp_path / "b/broken.py").write_text("import os; os.abort()\n")
    imported = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - imported:
        del sys.modules[name]


def test_functions_of_files_and_modules(directory):
    first = load_function("model", "a/nets.py:make")

    assert load_function("loss", "b/nets.py:make")() == "b"
    assert first() == "a"
    assert load_function("model", "usercode_package.nets:make")() == "usercode_package"
    assert first.__module__ != load_function("model", "b/nets.py:make").__module__
    assert find_source("model", "b/broken.py:make") == directory / "b/broken.py"
    assert (
        find_source("model", "usercode_package.nets:make") == directory / "usercode_package/nets.py"
    )
    assert find_source("model", "speednet94") is None
    assert find_source("loss", "") is None


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("b/nowhere.py:make", "/b/nowhere.py"),
        ("usercode_package.nowhere:make", "usercode_package.nowhere"),
        ("usercode_nowhere.nets:make", "usercode_nowhere.nets"),
        ("b/nets.py:mak", "function mak$"),
        ("b/nets.py:left_out", "function left_out$"),
    ],
)
def test_a_missing_file_module_or_function_is_a_usage_error(directory, name, mention):
    with pytest.raises(UsageError, match=f"^model={name}: .*{mention}"):
        load_function("model", name)


def test_the_code_of_a_function_is_what_its_file_imported_from_its_folder(directory, monkeypatch):
    """An edited helper is noticed without loading anything, and in this process refused, as is a
    helper of another folder by the same name.
    """
    for place in ("one", "two"):
        (directory / place / "usercode_parts").mkdir(parents=True)
        (directory / place / "usercode_parts/block.py").write_text("number = 1\n")
        (directory / place / "unused.py").write_text("")
        (directory / place / "net.py").write_text(
            "import json, usercode_parts.block\n\ndef make():\n    return 1\n"
        )
    program = types.ModuleType("__main__")
    program.__file__ = str(directory / "one/unused.py")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, program)
    load_function("model", "one/net.py:make")
    digests = code_digests("model", "one/net.py:make")

    assert list(digests) == ["", "usercode_parts/block.py"]
    assert is_unchanged("model", "one/net.py:make", digests)

    with pytest.raises(
        UsageError, match=r"^loss=two/net.py:make: .*one/usercode_parts/block.py as"
    ):
        load_function("loss", "two/net.py:make")

    (directory / "one/usercode_parts/block.py").write_text("number = 2\n")
    assert not is_unchanged("model", "one/net.py:make", digests)

    with pytest.raises(UsageError, match="^model=one/net.py:make: .*block.py was edited"):
        load_function("model", "one/net.py:make")

    packaged = "usercode_package.nets:make"
    load_function("model", packaged)

    assert list(code_digests("model", packaged)) == ["", "usercode_package/__init__.py"]
    assert code_digests("model", "speednet94") == {}
    assert is_unchanged("model", "speednet94", {})


def test_what_a_file_raises_is_not_caught(directory):
    (directory / "broken.py").write_text("import usercode_missing\n")
    with pytest.raises(ModuleNotFoundError, match="usercode_missing"):
        load_function("model", "broken.py:make")
