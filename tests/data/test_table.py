"""Data sets of the user's own: tables of image files and their classes."""

import pytest
from PIL import Image

from cifar_towers.data import sources
from cifar_towers.errors import DataError

FILES = ["a/1.png", "a/2.jpg", "3.png", "b/4.gif"]


def write(root, *lines):
    """Write pictures of one level each, 10, 20 and so on, and a table of these lines; return its data set's name."""
    for level, place in enumerate(FILES, 1):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (10 * level,) * 3).save(root / place)
    (root / "labels.csv").write_text("\n".join(lines), "utf-8")
    return f"csv:{root / 'labels.csv'}"


def examples(split):
    """Return (level, name of the class) of each example, sorted."""
    return sorted((int(i[0, 0, 0]), split.info.class_names[n]) for i, n in zip(split.images, split.labels, strict=True))


def load(name):
    return sources.load(sources.find(name), image_size=4)[1]


def test_files_are_relative_to_the_table(tmp_path):
    rows = ["a/1.png,été,train", 'a/2.jpg," cat, big",train', "3.png,été,test", "", "b/4.gif,été ,validation"]
    data = load(write(tmp_path, "\ufefffile,label,split", *rows))
    assert data.info.class_names == ("cat, big", "été")
    assert examples(data.train) == [(10, "été"), (20, "cat, big")]
    assert (examples(data.test), examples(data.validation)) == ([(30, "été")], [(40, "été")])


def test_table_without_splits_is_divided_alike_wherever_it_lies(tmp_path):
    one, other = (
        load(write(tmp_path / place, "label,file", *(f"{'dog' if n % 2 else 'cat'},{f}" for n, f in enumerate(FILES))))
        for place in ("one", "other")
    )
    assert one.digests() == other.digests()
    assert one.train.class_counts().tolist() == one.test.class_counts().tolist() == [1, 1]
    assert examples(one.train) + examples(one.test) != examples(one.test)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "its columns are ; the columns of the first line must be file,label or file,label,split"),
        (["a/1.png,cat"], "its columns are a/1.png, cat; the columns"),
        (["path,label", "a/1.png,cat"], "its columns are path, label; the columns"),
        (["file;label", "a/1.png;cat"], "its columns are file;label; the columns"),
        (["file,label,is_valid", "a/1.png,cat,True"], "its columns are file, label, is_valid; the columns"),
        (["file,label,Usage", "a/1.png,cat,Test"], "its columns are file, label, Usage; the columns"),
        (["file,label,label", "a/1.png,cat,dog"], "its columns are file, label, label; the columns"),
        (["file,label", "a/1.png,cat", "a/2.jpg"], "line 3 must have a value for each of file,label"),
        (["file,label", "a/1.png,cat", "a/2.jpg,dog,big"], "line 3 must have a value for each of file,label"),
        (["file,label,split", "a/1.png,cat,"], "line 2 must have a value for each of file,label,split"),
        (["file,label,split", "a/1.png,cat,val"], "line 2 has the split val; splits are train, validation, test"),
        (["file,label", "a/1.png,cat", "a/1.png,dog"], "line 3 names a/1.png again"),
        (
            ["file,label,split", "a/1.png,cat,train", "a/2.jpg,dog,train", "3.png,Cat,test"],
            "test has the classes Cat, and train only cat, dog",
        ),
        (["file,label", *(f"{name},{name[0]}" for name in FILES)], "there are no images of 3, b to train on"),
    ],
)
def test_unusable_table_is_an_error_of_one_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as caught:
        sources.find(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files_are_named(tmp_path):
    table = write(tmp_path, "file,label,split", "a/1.png,cat,train", "a/2.jpg,dog,train", "a/5.png,dog,test")
    with pytest.raises(DataError, match=r"a/5.png cannot be read as an image: No such file"):
        load(table)
    with pytest.raises(DataError, match=r"none.csv: .*No such file"):
        sources.find(f"csv:{tmp_path}/none.csv")
    (tmp_path / "labels.csv").write_bytes("file,label\na/1.png,été".encode("latin-1"))
    with pytest.raises(DataError, match="utf-8"):
        sources.find(table)
