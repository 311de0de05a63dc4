"""Statistics over the runs of several seeds, as TensorBoard reads them."""

import time
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util.tensor_util import make_ndarray

from cifar_towers.reporting import tensorboard_writer
from cifar_towers.reporting.seed_statistics import SeedStatistics, read_scalars
from cifar_towers.reporting.tensorboard_writer import EventWriter

PREFIXES = ("", "std/", "mean-std/", "mean+std/", "n/")


def write_run(directory, losses, first_step=10):
    writer = EventWriter(directory / "train")
    for step, loss in enumerate(losses, first_step):
        writer.write(step, [scalar_pb("loss", loss), scalar_pb("speed/images_per_sec", 100.0)])
    EventWriter(directory / "eval").write(first_step, [scalar_pb("accuracy/test/raw", losses[-1] / 10)])


def tensorboard(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def read(directory):
    (path,) = directory.glob("events*")
    return dict(read_scalars(path))


def test_statistics_at_each_step_are_those_of_the_runs_that_have_it(tmp_path):
    """Also while a run is at work, and of one that is not finite there."""
    runs = [tmp_path / f"seed{seed}" for seed in range(3)]
    seeds = SeedStatistics(tmp_path / "seeds", runs)
    seeds.update()
    assert not (tmp_path / "seeds").exists()
    write_run(runs[0], [4.0, 3.0, 2.0])
    seeds.update()
    assert read(tmp_path / "seeds/train")["n/loss", 12] == 1 and read(tmp_path / "seeds/train")["std/loss", 12] == 0
    write_run(runs[1], [5.0, 3.5])
    write_run(runs[2], [7.0, np.nan])
    seeds.update()
    found = read(tmp_path / "seeds/train")
    for step, values in ((10, [4, 5, 7]), (11, [3, 3.5]), (12, [2])):
        mean, std = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0
        shown = [found[prefix + "loss", step] for prefix in PREFIXES]
        np.testing.assert_allclose(shown, [mean, std, mean - std, mean + std, len(values)], 1e-6)
    assert read(tmp_path / "seeds/eval")["n/accuracy/test/raw", 10] == 2
    (path,) = (tmp_path / "seeds/train").glob("events*")
    seeds.update()
    assert list((tmp_path / "seeds/train").glob("events*")) == [path]  # nothing was new


def test_tensorboard_shows_the_latest_statistics_only_and_their_bands(tmp_path):
    """A reader that has the statistics open, as TensorBoard has, forgets those of fewer runs."""
    runs = [tmp_path / f"seed{seed}" for seed in range(2)]
    seeds = SeedStatistics(tmp_path / "seeds", runs)
    write_run(runs[0], [4.0, 3.0, 2.0])
    seeds.update()
    accumulator = tensorboard(tmp_path / "seeds/train")
    write_run(runs[1], [5.0, 4.0, 3.0])
    seeds.update()
    for reader in (accumulator, tensorboard(tmp_path / "seeds/train")):
        reader.Reload()
        assert [(e.step, float(make_ndarray(e.tensor_proto))) for e in reader.Tensors("loss")] == [
            (10, 4.5), (11, 3.5), (12, 2.5),
        ]  # fmt: skip
    content = accumulator.Tensors("custom_scalars__config__")[-1].tensor_proto
    (category,) = layout_pb2.Layout.FromString(make_ndarray(content).item()).category
    assert category.title.startswith("training")  # TensorBoard would show one of two categories of a name
    bands = {chart.title: [(s.value, s.lower, s.upper) for s in chart.margin.series] for chart in category.chart}
    tags = {"training loss": "loss", "throughput, images/s": "speed/images_per_sec"}
    assert bands == {title: [(tag, f"mean-std/{tag}", f"mean+std/{tag}")] for title, tag in tags.items()}


def test_runs_that_are_to_be_overwritten_count_once_they_have_started_again(tmp_path):
    runs = [tmp_path / f"seed{seed}" for seed in range(2)]
    for run in runs:
        write_run(run, [8.0, 7.0])
    (old,) = (runs[0] / "train").glob("events*")
    seeds = SeedStatistics(tmp_path / "seeds", runs, overwritten=runs)
    seeds.update()
    assert not (tmp_path / "seeds").exists()
    old.unlink()
    write_run(runs[0], [4.0])
    seeds.update()
    found = read(tmp_path / "seeds/train")
    assert (found["loss", 10], found["n/loss", 10]) == (4, 1) and ("loss", 11) not in found


def test_earlier_statistics_stay_until_new_ones_are_written(tmp_path, monkeypatch):
    """The disk is full, and later has room again."""
    seeds = SeedStatistics(tmp_path / "seeds", [tmp_path / "seed0"])
    write_run(tmp_path / "seed0", [4.0])
    seeds.update()
    earlier = list((tmp_path / "seeds/train").iterdir())
    write_run(tmp_path / "seed0", [3.0], first_step=11)
    with monkeypatch.context() as patch:
        full = Mock(side_effect=tf.errors.ResourceExhaustedError(None, None, "No space left on device"))
        patch.setattr(tensorboard_writer.tf.io.TFRecordWriter, "write", full)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            seeds.update()
    assert list((tmp_path / "seeds/train").iterdir()) == earlier
    seeds.update()
    assert read(tmp_path / "seeds/train")["loss", 11] == 3


def test_statistics_are_updated_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr("cifar_towers.reporting.seed_statistics.SECONDS_BETWEEN_UPDATES", 0.01)
    monkeypatch.setattr("cifar_towers.reporting.seed_statistics.SHARE_OF_TIME", 1.0)
    seeds = SeedStatistics(tmp_path / "seeds", [tmp_path / "seed0"])
    update, failures = seeds.update, [OSError("replaced"), tf.errors.NotFoundError(None, None, "removed meanwhile")]

    def fail_once_and_update():
        if failures:
            raise failures.pop()
        update()

    seeds.update = fail_once_and_update
    with seeds.updated_in_background():
        write_run(tmp_path / "seed0", [4.0, 3.0])
        deadline = time.monotonic() + 60
        while not list((tmp_path / "seeds/eval").glob("events*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert read(tmp_path / "seeds/train")["loss", 11] == 3
