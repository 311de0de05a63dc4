import io
import json

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from werkzeug.test import Client

from cifar_towers import files
from cifar_towers.reporting import figures, projector

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = ["features.tsv", "metadata.tsv", "sprite.png", "projector_config.pbtxt"]


def state(number, width=5, side=32):
    """Features, images and metadata of examples."""
    generator = np.random.default_rng(number)
    features = np.maximum(generator.normal(size=(number, width)), 0).astype(np.float32)
    images = generator.integers(0, 256, (number, side, side, 3), np.uint8)
    labels, probabilities = generator.integers(0, 10, number), generator.dirichlet(np.ones(10), number)
    return features, images, projector.metadata_columns(labels, probabilities, CIFAR)


def fetch(logdir, route, run=""):
    """Return the response of TensorBoard's projector."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    plugin = ProjectorPlugin(TBContext(logdir=str(logdir), data_provider=provider))
    answer = Client(plugin.get_plugin_apps()[route]).get(f"{route}?run={run}&name=features&num_rows=100000")
    assert answer.status_code == 200, answer.data
    return answer.data


@pytest.mark.parametrize(
    ("run", "number", "width", "side"),
    [("run/projector", 1, 1, 32), ("run/projector", 7, 5, 32), ("run/projector", 30, 64, 24), (".", 3, 5, 32)],
)
def test_projector_plugin_serves_all_files(tmp_path, run, number, width, side):
    features, images, columns = state(number, width, side)
    projector.write(tmp_path / run, features, images, columns)
    assert json.loads(fetch(tmp_path, "/runs")) == [run]
    (embedding,) = json.loads(fetch(tmp_path, "/info", run))["embeddings"]
    assert embedding["tensorShape"] == [number, width] and embedding["sprite"]["singleImageDim"] == [side, side]

    vectors = np.frombuffer(fetch(tmp_path, "/tensor", run), np.float32).reshape(number, width)
    np.testing.assert_allclose(vectors, features, rtol=1e-5)
    sprite = Image.open(io.BytesIO(fetch(tmp_path, "/sprite_image", run)))
    assert np.array_equal(np.array(sprite), figures.sprite(images))
    header, *rows = [line.split("\t") for line in fetch(tmp_path, "/metadata", run).decode().splitlines()]
    assert header == ["class", "predicted", "confidence", "right", "example"]
    assert rows == [[str(value) for value in row] for row in zip(*columns.values(), strict=True)]


def test_metadata_columns():
    probabilities = np.zeros((2, 10))
    probabilities[:, 3] = 0.98765, 1
    assert projector.metadata_columns(np.array([3, 5]), probabilities, CIFAR) == {
        "class": ["cat", "dog"],
        "predicted": ["cat", "cat"],
        "confidence": ["0.9877", "1.0000"],
        "right": ["yes", "no"],
        "example": [0, 1],
    }


def test_tabs_and_newlines_in_names_become_spaces(tmp_path):
    features, images, _ = state(2)
    columns = {"class": ["tabby\tcat", "big\r\ndog "], "of a\nkind": ["ä\u2028b", ""]}
    projector.write(tmp_path, features, images, columns)
    assert (tmp_path / "metadata.tsv").read_bytes().decode() == "class\tof a kind\ntabby cat\tä b\nbig dog\t\n"


def test_files_are_replaced_atomically_and_the_event_file_is_last(tmp_path, monkeypatch):
    projector.write(tmp_path, *state(4))
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    order = []

    def replace(temporary, path):
        assert path.read_bytes() == before[path.name]
        order.append(path.name)
        temporary.rename(path)

    monkeypatch.setattr(files.os, "replace", replace)
    projector.write(tmp_path, *state(5))
    assert order == FILES and all((tmp_path / name).read_bytes() != before[name] for name in FILES)
    assert len(list(tmp_path.iterdir())) == len(FILES) + 1  # and one event file

    monkeypatch.setattr(files.os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        projector.write(tmp_path / "new", *state(4))
    assert not list((tmp_path / "new").glob("*tfevents*"))


def test_existing_event_files_stay(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").touch()
    projector.write(tmp_path, *state(2))
    assert [path.name for path in tmp_path.glob("*tfevents*")] == ["events.out.tfevents.1.host"]


def test_invalid_arguments_are_refused(tmp_path):
    features, images, columns = state(4)
    for arguments, message in (
        ((features[:3], images, columns), "'features': 3, 'images': 4"),
        ((features, images[:3], columns), "'images': 3"),
        ((features, images, columns | {"right": ["yes"]}), "'right': 1"),
        (state(0), "at least one"),
        ((features * np.nan, images, columns), "finite"),
        (state(2, side=5000), "1 images of 5000 x 5000, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            projector.write(tmp_path / "projector", *arguments)
    assert not list(tmp_path.iterdir())
