"""Tables of corrupted test images."""

import json
from unittest.mock import Mock

import numpy as np
import pytest

import cifar_towers
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources, synthetic
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError
from cifar_towers.inference import evaluate
from cifar_towers.inference.evaluate import evaluate_checkpoint
from tests.runs import short_runs

TRAIN, TEST = synthetic.make(300, 0, 0), synthetic.make(60, 0, 1)
CONFIG = TrainConfig(
    num_gpus=2, model="cifarnet", crop=0, shift=0, batch_size=50, epochs=2, precision="float32", dataset="synthetic",
    learning_rate=0.05, summary_every_steps=0, eval_every_epochs=0.0, momentum=0.0,
)  # fmt: skip
NAMES = [f"{corruption}_{severity}" for corruption in ("fog", "saturate") for severity in range(1, 6)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    with short_runs.small_runs(TRAIN, TEST):
        short_runs.run(CONFIG, directory)
    return directory


def test_corruptions_of_a_data_set_are_a_table_with_means(run, monkeypatch):
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, TEST.images.shape)
    sets = {
        name: Split(((1 - weight) * TEST.images + weight * noise).astype(np.uint8), TEST.labels, TEST.info)
        for name, weight in zip(NAMES, np.linspace(0.1, 0.9, 10), strict=True)
    }
    read = Mock(side_effect=lambda image_size, names: {name: sets[name] for name in names})
    source = sources.Source("cifar10_corrupted/*", read, corruptions=tuple(NAMES))
    monkeypatch.setattr(sources, "find", lambda dataset, data_dir="": source)
    loaded = Mock(side_effect=evaluate.TrainedModel)
    monkeypatch.setattr(evaluate, "TrainedModel", loaded)

    def score(json_=True, **settings):
        return evaluate_checkpoint(EvaluateConfig(train_dir=str(run), precision="float32", json=json_, **settings))

    record = json.loads(score(num_images=40))
    assert loaded.call_count == 1 and read.call_count == 10 and record["count"] == 40
    logits_of = {
        name: cifar_towers.predict(run, split.images[:40], precision="float32") for name, split in sets.items()
    }
    right = {name: float((found.argmax(1) == TEST.labels[:40]).mean()) for name, found in logits_of.items()}
    loss = {name: float(-np.log(found[range(40), TEST.labels[:40]]).mean()) for name, found in logits_of.items()}
    for table, expected in ((record["accuracy"], right), (record["loss"], loss)):
        assert len({*expected.values()}) > 2 and table.keys() == {"fog", "saturate", "mean"}
        for corruption in ("fog", "saturate"):
            cells = [expected[f"{corruption}_{severity}"] for severity in range(1, 6)]
            assert table[corruption] == pytest.approx(dict(zip("12345", cells, strict=True)) | {"mean": np.mean(cells)})
        assert table["mean"]["mean"] == pytest.approx(np.mean([*expected.values()]))
        assert table["mean"]["3"] == pytest.approx((expected["fog_3"] + expected["saturate_3"]) / 2)
    title, line, blank, header, *rows = score(json_=False).splitlines()
    assert ": cifar10_corrupted/* test, raw weights, TTA 0" in title and "on 60 images by severity" in line
    assert not blank and header.split() == ["corruption", *"12345", "mean"]
    assert [row.split()[0] for row in rows] == ["fog", "saturate", "mean"]
    with pytest.raises(UsageError, match="has corrupted test images only; leave --split out"):
        score(split="train")


def test_published_mean_is_that_of_fifteen_corruptions_and_needs_all_of_them():
    published = [f"corruption{number}" for number in range(15)]
    names = [f"{name}_{severity}" for name in (*published, *evaluate.EXTRA) for severity in (1, 5)]
    scores = {name: Mock(count=10, accuracy=number, loss=0.0, ece=0.0) for number, name in enumerate(names)}
    for given in (names, names[:30]):
        table = evaluate._tabulate({name: scores[name] for name in given})["accuracy"]
        for severity, ending in (("1", "_1"), ("5", "_5"), ("mean", "")):
            means = [np.mean([scores[n].accuracy for n in some if n.endswith(ending)]) for some in (given, names[:30])]
            assert [table[row][severity] for row in ("mean", "mean without extra")] == pytest.approx(means)
    assert "mean without extra" not in evaluate._tabulate({name: scores[name] for name in names[2:]})["accuracy"]
