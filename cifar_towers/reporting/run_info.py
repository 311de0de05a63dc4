"""What a run trains and where, and the records of its evaluations: the values that reports are made of."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from cifar_towers.config import TrainConfig, parse_shares
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Dataset
from cifar_towers.evaluation.score import Evaluation
from cifar_towers.reporting import figures
from cifar_towers.towers import Tower
from cifar_towers.towers.sharding import share_out


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What a run trains and where, fixed before its first step."""

    config: TrainConfig
    dataset: Dataset
    banner: str  # a warning that the data are synthetic, or empty
    local_towers: Sequence[Tower]  # of this process, that the batch or the model is split over
    towers: Sequence[Tower]  # of the step: a single one where the model is split
    precision: str
    length: RunLength
    image_size_at: Callable[[int], int]  # step -> side of its images in pixels
    model: keras.Model
    variables: Mapping[str, tf.Variable]  # all that is saved, by name
    activation_layers: Sequence[str]  # names of the layers in `ForwardDiagnostics.activations`

    def describe_parallelism(self) -> str:
        """Such as `2 towers of 768 images on /CPU:0, /CPU:1`."""
        config, num_towers = self.config, len(self.towers)
        devices = ", ".join(tower.device for tower in self.local_towers)
        if config.strategy == "multi_worker":
            devices = f"{num_towers // len(self.local_towers)} workers"
        parts = f"{config.micro_batches} x " if config.micro_batches > 1 else ""
        shares = parse_shares(config.tower_shares) or [1] * num_towers
        shard_sizes = share_out(config.batch_size, shares, config.micro_batches)
        sizes = [size // config.micro_batches for size in shard_sizes]
        images = f"{parts}{', '.join(map(str, sizes)) if config.tower_shares else sizes[0]} images"
        stages = f" in {len(self.local_towers)} stages" if config.parallelism == "model" else ""
        mirrored = ", mirrored" if config.strategy == "mirrored" else ""
        return f"{num_towers} tower{'s' * (num_towers > 1)} of {images}{stages} on {devices}{mirrored}"


def evaluation_record(evaluation: Evaluation) -> dict:
    """An evaluation as in metrics.jsonl and result.json; without a confusion matrix of many classes."""
    score = evaluation.score
    record = {"split": evaluation.split, "weights": evaluation.weights, "tta": evaluation.tta}
    record |= {"count": score.count, "accuracy": score.accuracy, "loss": score.loss}
    if len(score.confusion) <= figures.MAX_CLASSES:
        record["confusion"] = score.confusion.tolist()
    return record


def describe_score(record: Mapping) -> str:
    """Such as `test 93.21 % (ema weights, TTA 2, 10,000 images)`, of an evaluation's record."""
    return (
        f"{record['split']} {100 * record['accuracy']:.2f} % "
        f"({record['weights']} weights, TTA {record['tta']}, {record['count']:,} images)"
    )


def score_tag(split: str, weights: str, tta: int, **_) -> str:
    """What an evaluation's tags end in, such as `test/ema_tta2`."""
    return f"{split}/{weights}" + (f"_tta{tta}" if tta else "")
