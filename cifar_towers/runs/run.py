"""A run in its directory, as every program, callback and `cifar_towers.train` has it.

This module imports neither NumPy nor TensorFlow. What needs them in `Run` imports them when it is
used.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_towers import files
from cifar_towers.config.flags import make_config
from cifar_towers.config.programs import (
    ComputeConfig,
    EvaluateConfig,
    ExportConfig,
    TrainedRunConfig,
)
from cifar_towers.config.train_config import PER_RUN
from cifar_towers.errors import UsageError
from cifar_towers.hardware import tensorflow_imported
from cifar_towers.reporting.records import read_records

if TYPE_CHECKING:
    import keras
    import numpy as np


def load_run(directory: Path | str, name: str = "") -> "Run":
    """Return the run in a directory, called `name` in tables.

    Raises:
      UsageError: the directory holds no run.
    """
    run = Run(Path(directory).expanduser(), name)
    if not (run.directory / files.CONFIG).exists():
        raise UsageError(f"{directory} is not the directory of a run: it has no {files.CONFIG}")
    return run


class Run:
    """A run in a directory, finished or not. Its files are read when they are asked for; a missing
    one is empty.

    docs/reference.md lists the keys and units of its records.

    Attributes:
      directory: path of the directory of the run.
      name: the run's name in tables; default: that of its directory.
    """

    def __init__(self, directory: Path | str, name: str = ""):
        self.directory = Path(directory).absolute()
        self.name = name or self.directory.name
        self._records: list[dict[str, Any]] = []
        # time and size of the file when `_records` were read
        self._stamp: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The settings that the run was trained with, by name."""
        return files.read_json(self.directory / files.CONFIG)

    @property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json: command, machine, versions, towers, digests of the
        data.
        """
        return files.read_json(self.directory / files.ENVIRONMENT)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of probabilities."""
        return self.environment.get("class_names", [])

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of training steps, in order; `pandas.DataFrame(run.history)` makes a table of
        them.
        """
        return [record for record in self._read_records() if record["kind"] == "train"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations, in order, each with `step`, `split`, `weights`, `tta`,
        `accuracy` and `loss`.
        """
        return [record for record in self._read_records() if record["kind"] == "eval"]

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None if the run is not finished, or was continued."""
        result = files.read_json(self.directory / files.RESULT)
        return result if result.get("step", -1) >= self.step else None

    @property
    def step(self) -> int:
        """The last recorded step; 0 before the first."""
        return max((record["step"] for record in self._read_records()), default=0)

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.result is not None

    @property
    def state(self) -> str:
        """The state of the run in tables: `done` if it has a result, otherwise `unfinished`."""
        return "done" if self.finished else "unfinished"

    @property
    def title(self) -> str:
        """The recipe's name, otherwise the model's."""
        return self.config.get("recipe") or self.config.get("model") or self.name

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that repetitions of one experiment share, with precision, number of towers,
        digests, and the lineage of the weights if there is one.
        """
        settings = {name: value for name, value in self.config.items() if name not in PER_RUN}
        environment = self.environment
        for part in ("data", "code"):
            for name, sha256 in environment.get(f"{part}_sha256", {}).items():
                settings[f"{name}_{part}"] = sha256[:12]
        if environment.get("lineage"):
            settings["lineage"] = "; ".join(environment["lineage"])
        towers = len(environment.get("towers", []))
        return settings | {"precision": environment.get("precision"), "num_gpus": towers}

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The records of the newest evaluation by name, e.g. `test_tta`."""
        from cifar_towers.evaluation.score import score_name

        if self.result:
            newest = self.result["evaluations"]
        else:
            evaluations = self.evaluations
            last_step = evaluations[-1]["step"] if evaluations else 0
            newest = [record for record in evaluations if record["step"] == last_step]
        return {score_name(record): record for record in newest}

    @property
    def reported_score(self) -> Mapping[str, Any] | None:
        """The score of the newest evaluation that the run reports; see
        `evaluation.score.reported_score`.
        """
        from cifar_towers.evaluation.score import reported_score

        return reported_score(list(self.scores.values()))

    def evaluate(self, **settings: Any) -> dict[str, Any]:
        """Evaluate a checkpoint of the run, as `cifar-towers evaluate --json` does.

        Args:
          **settings: flags of `cifar-towers evaluate` by name, such as `tta=True`, `split`, `step`,
            `dataset`, or `model` for your own net.

        Returns:
          `accuracy` in [0, 1], both ends of its 95 % confidence interval (`interval95`), `loss`
          (mean cross entropy, nats: the NLL), the calibration as `ece` and `reliability` (see
          docs/reference.md), `count` (images), `per_class` (accuracy by class name, NaN without
          examples), `confusion` [C, C] (images by true class and by prediction), and what was
          evaluated.

        Raises:
          RunError: there is no such run or split, its data cannot be read or have changed, or
            logits are not finite.
        """
        config = make_config(EvaluateConfig, {"train_dir": self.directory, **settings})
        with tensorflow_imported():
            from cifar_towers.inference.evaluate import evaluate_checkpoint

            return evaluate_checkpoint(config)

    def predict(
        self, images: "np.ndarray | Iterable[Path | str] | Path | str", **settings: Any
    ) -> "np.ndarray":
        """Classify images by a checkpoint of the run.

        Args:
          images: [n, S, S, 3] uint8 levels in the training's size, or paths of image files or of
            folders, or one path. The images of a folder are sorted by name.
          **settings: flags of `cifar-towers predict` by name, such as `tta=True`, `step`, or
            `model` for your own net.

        Returns:
          Probabilities [n, C] float64, with the classes in the order of `class_names`.

        Raises:
          RunError: there is no such run, the array has another shape or type, a file cannot be
            read, or logits are not finite.
        """
        config = make_config(ComputeConfig, {"train_dir": self.directory, **settings})
        with tensorflow_imported():
            from cifar_towers.inference.predict import predict_probabilities

            return predict_probabilities(config, images)

    def export(self, **settings: Any) -> None:
        """Export the model of a checkpoint with its preprocessing, as `cifar-towers export` does.

        Args:
          **settings: flags of `cifar-towers export` by name, such as `format="onnx"`, `out`, or
            `model` for your own net.

        Raises:
          RunError: there is no such run or checkpoint, or the export does not agree with the
            checkpoint.
        """
        config = make_config(ExportConfig, {"train_dir": self.directory, **settings})
        with tensorflow_imported():
            from cifar_towers.inference.export import export_model

            export_model(config)

    def model(self, **settings: Any) -> "keras.Model":
        """Return the model with its preprocessing: images [B, S, S, 3] of the training's size ->
        probabilities [B, C].

        Images are uint8 levels, probabilities float32.

        Args:
          **settings: `step` of the checkpoint (default: the newest), `weights` (`raw` or `ema`;
            default: the average if there is one), and `model`, which your own net needs.

        Raises:
          RunError: there is no such checkpoint, or it is damaged.
        """
        config = make_config(TrainedRunConfig, {"train_dir": self.directory, **settings})
        with tensorflow_imported():
            from cifar_towers.inference.export import make_portable_model
            from cifar_towers.inference.predict import TrainedModel

            return make_portable_model(TrainedModel(config))

    def _read_records(self) -> list[dict[str, Any]]:
        """Return all records. The file is read again only if it has changed."""
        path = self.directory / files.METRICS
        stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        if stamp != self._stamp:
            self._records = list(read_records(path))
            self._stamp = stamp
        return self._records
