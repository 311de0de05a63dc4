"""Data sets of the user's own: tables of image files and their classes."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import sources, table
from cifar_towers.errors import DataError

NAMES = ["a/1.png", "a/2.jpg", "3.png", "b/4.gif"]


def write(root, lines, places=NAMES, end="\n"):
    """Write pictures of one level each, 10, 20 and so on, and a table of these lines; return its data set's name."""
    for level, place in enumerate(places, 1):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (10 * level,) * 3).save(root / place)
    (root / "labels.csv").write_bytes(end.join(lines).encode())
    return f"csv:{root / 'labels.csv'}"


def examples(split):
    """Return (level, name of the class) of each example, sorted."""
    return sorted((int(i[0, 0, 0]), split.info.class_names[n]) for i, n in zip(split.images, split.labels, strict=True))


def load(name):
    return sources.load(sources.find(name), image_size=4)[1]


@pytest.mark.parametrize(
    "lines",
    [
        ["path,label,split", "a/1.png,dog,train", "a/2.png,cat,Training", "3.png,cat,test", "b/4.png,dog,test"],
        [
            "Split;Category;Filename",
            "train;dog;a\\1.png",
            "train; cat ;a/2.png",
            "test;cat;3.png",
            "",
            "TEST;dog;b/4.png",
        ],
        [
            "\ufeffnr\timage_id\tclass\tsubset",
            "1\ta/1\tdog\ttrain",
            "2\ta/2\tcat\ttrain",
            "3\t3\tcat\tval",
            "4\tb/4\tdog\tval",
        ],
    ],
    ids=["commas", "semicolons", "tabs"],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_read_by_the_names_of_their_columns(tmp_path, lines, end):
    data = load(write(tmp_path, lines, ["a/1.png", "a/2.png", "3.png", "b/4.png"], end))
    assert data.info.class_names == ("cat", "dog")
    assert examples(data.train) == [(10, "dog"), (20, "cat")] and examples(data.test) == [(30, "cat"), (40, "dog")]
    np.testing.assert_allclose(data.info.mean, [15] * 3)
    assert data.name == f"csv:{tmp_path / 'labels.csv'}"


def test_ids_are_files_beside_the_table_or_in_a_usual_folder_and_classes_are_in_the_order_of_numbers(tmp_path):
    lines = ["id,label,split", "1,10,train", "2,9,train", "3,10,test", "4,9,test"]
    name = write(tmp_path, lines, ["train/1.png", "4.jpg", "test/1.png", "train/2.png", "images/3.jpeg", "2.png"])
    data = load(name)
    assert data.info.class_names == ("9", "10")
    assert examples(data.train) == [(10, "10"), (60, "9")]  # beside the table comes before train/
    assert abs(examples(data.test)[0][0] - 20) <= 1 and abs(examples(data.test)[1][0] - 50) <= 1  # JPEG


def test_table_without_splits_is_divided_as_a_folder_is(tmp_path):
    places = [f"{name}/{number}.png" for name in ("cat", "dog", "owl") for number in range(6)]
    name = write(tmp_path / "set", ["file,class", *(f"{place},{place[:3]}" for place in places)], places)
    table, data = load(name), load(f"folder:{tmp_path / 'set'}")
    assert table.digests() == data.digests() and table.info == data.info


def test_table_beside_its_pictures_is_divided_alike_in_a_folder_of_another_name(tmp_path):
    places = [f"{number}.png" for number in range(12)]
    lines = ["file,class", *(f"{place},{'cat' if number % 2 else 'dog'}" for number, place in enumerate(places))]
    one, other = (load(write(tmp_path / name, lines, places)) for name in ("set", "renamed"))
    assert one.digests() == other.digests() and len(one.test.labels) == 2


def test_test_rows_name_no_training_pictures(tmp_path):
    places = ["train/1.png", "test/1.png", "val/1.png", "train/2.png", "test/2.png"]
    lines = [
        "file,label,split",
        *(f"{n},{name},{s}" for s in ("train", "test") for n, name in ((1, "cat"), (2, "dog"))),
    ]
    name = write(tmp_path, [*lines, "1,cat,valid"], places)
    data = load(name)
    assert examples(data.train) == [(10, "cat"), (40, "dog")] and examples(data.validation) == [(30, "cat")]
    assert examples(data.test) == [(20, "cat"), (50, "dog")]
    (tmp_path / "test/2.png").unlink()
    with pytest.raises(DataError, match=r"wrong rows \(1\): line 5 \(no file 2\); correct"):
        sources.find(name)


def test_rows_of_a_split_without_a_folder_are_looked_for_among_training_pictures(tmp_path):
    lines = ["file,label,split", *(f"{n},{name},{s}" for n, name, s in ((1, "cat", "train"), (2, "dog", "train")))]
    name = write(tmp_path, [*lines, "3,cat,test", "4,dog,test"], [f"train/{number}.png" for number in range(1, 5)])
    data = load(name)
    assert examples(data.train) == [(10, "cat"), (20, "dog")] and examples(data.test) == [(30, "cat"), (40, "dog")]


def test_table_with_test_rows_alone_is_scored_and_not_trained_on(tmp_path):
    name = write(tmp_path, ["path,label,split", "3.png,cat,test"])
    assert examples(sources.load_split(sources.find(name), "test", 4)) == [(30, "cat")]


HEADER = "path,label,split"
GOOD = ["a/1.png,dog,train", "a/2.jpg,cat,train", "3.png,cat,test", "b/4.gif,dog,test"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [
                HEADER,
                "a/9.png,dog,train",
                "3.png,,train",
                *GOOD[:2],
                '"3.png",cat,late',
                "a/1.png,dog,test",
                "x,cat,test",
            ],
            r"wrong rows \(5\): line 2 \(no file a/9.png\), line 3 \(no class\), line 6 \(no split late\) and 2 more",
        ),
        ([HEADER, *GOOD, "3.png,cat,test"], r"wrong rows \(1\): line 6 \(3.png is listed twice\); "),
        (
            [HEADER, "", '"a/1.png","d', 'og",train', "a/9.png,dog"],
            r"line 5 \(no file a/9.png\); correct or remove them",
        ),
        (
            ["a/1.png,dog", "a/2.png,cat"],
            r"its first line, a/1.png,dog, must name a column file or path .*; put file,label",
        ),
        ([], "its first line, , must name a column"),
        ([HEADER], "at least two classes are needed, and there is none"),
        ([HEADER, "a/1.png,dog,train", "3.png,dog,test"], "at least two classes are needed, and there is dog"),
        ([HEADER, *GOOD[:3]], "no images of dog to test on"),
        (
            [HEADER, *GOOD, "5.png,dog,all", "6.png,dog,all", "7.png,cat,all", "8.png,cat,all"],
            "some examples are of train, test, and others have no split; give all a split, or none",
        ),
        ([HEADER, *GOOD, "c/scan.tif,dog,test"], r"line 6 \(c/scan.tif is no image\); images are .jpg, .*, .webp; cor"),
        ([HEADER, GOOD[0], *GOOD[2:]], "no images of cat to train on"),
        (["path,label", *(line[: line.rindex(",")] for line in GOOD[:2])], "no images of cat, dog to train on"),
        ([HEADER, "a" * 200_000], "field larger than field limit"),
        (
            ["file,label", "3.png,Lucanus cervus, male", "b/4.gif,cat,", "a/1.png", "a/2.jpg,dog"],
            r"line 2 \(3 instead of 2 fields\), line 4 \(1 instead of .*that contains a comma in quotes; correct",
        ),
        (
            ["file,label", *["3.png,cat"] * 2, "a/1.png,dog", "a/1.png,owl"],
            r"line 3 \(3.png is listed twice\), line 5 .*; line 2 says cat, line 3 cat; line 4 says dog, line 5 owl; ",
        ),
        (["file,label", "B/4.GIF,cat", "A/1.PNG,dog", "3.PNG,dog"], r"line 4 \(no file 3.PNG\); 3.png is there; "),
        (
            [HEADER, *GOOD, "x.png,cat,tarin", "a/1.png,dog,tarin"],
            r"line 6 \(no file x.png\), line 7 \(a/1.png is listed twice\); line 2 says dog, line 7 dog; correct",
        ),
        (
            [HEADER, "a/1.png,dog,tarin"],
            r"\(no split tarin\); did you mean train\? splits are train, training, .*, test_set, all;",
        ),
        (
            ["file,label", "a/1.png,dog", "a/2.jpg,dog", "3.png,Dog", "b/4.gif,NA"],
            r"Dog, NA to train on; did you mean dog\? .*; the only rows are Dog in line 4 \(.*/3.png\), NA in line 5",
        ),
        (
            [HEADER, *GOOD[:3]],
            r"no images of dog to test on; every class .*; the only rows are dog in line 2 \(.*/a/1.png\)$",
        ),
        (
            ["file,species", "a/1.png,dog"],
            "file,species, must name a column label or class or .*; rename species to label$",
        ),
        (
            ["picture,species,sex"],
            "must name a column file or .* and a column label .*; put file,label above the rows, or in",
        ),
        (
            ["file;sex;label;;", "a/1.png;male;dog", "a/2.jpg;male"],
            r"line 3 \(2 instead of 3 fields\); correct",
        ),
        (["file|label", "a/1.png|dog"], r"its columns are separated by '\|'; use a comma, semicolon or tab$"),
    ],
)
def test_unusable_table_is_an_error_of_one_line(tmp_path, lines, message):
    name = write(tmp_path, lines, [*NAMES, *(f"{number}.png" for number in range(5, 9)), "c/scan.tif"])
    with pytest.raises(DataError, match=message) as caught:
        sources.find(name)
    assert str(caught.value).startswith(f"dataset={name}") and "\n" not in str(caught.value)


def test_unreadable_table_and_images_are_named(tmp_path):
    name = write(tmp_path, [HEADER, *GOOD])
    (tmp_path / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1 of 4 images cannot be read: .*3.png is not a JPEG"):
        sources.load(sources.find(name))
    (tmp_path / "labels.csv").write_bytes("path,label\nMöwe.png,Möwe".encode("latin1"))
    with pytest.raises(DataError, match=r"labels.csv is not in UTF-8; save it as UTF-8 \(Excel: CSV UTF-8\)$"):
        sources.find(name)
    os.remove(tmp_path / "labels.csv")
    with pytest.raises(DataError, match=r"labels.csv cannot be read: No such file or directory"):
        sources.find(name)


def test_docs_name_every_column():
    page = (Path(__file__).parents[2] / "docs/your-own.md").read_text()
    assert [name for names in table.COLUMNS.values() for name in names if f"`{name}`" not in page] == []
