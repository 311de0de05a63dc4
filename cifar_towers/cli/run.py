"""A run in a directory, as callbacks and `cifar_towers.train` have it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_towers.config.programs import TrainedRunConfig
from cifar_towers.config.train_config import make_config
from cifar_towers.hardware import tensorflow_imported

if TYPE_CHECKING:
    import keras


class Run:
    """A run in a directory, finished or not. Its files are read when they are asked for.

    docs/tracking.md lists the keys and units of its records.

    Attributes:
      directory: path of the directory of the run.
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory).absolute()

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The settings that the run was trained with, by name."""
        from cifar_towers import files

        return files.read_json(self.directory / files.CONFIG)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of probabilities; [] if the run has not written them."""
        from cifar_towers import files

        return files.read_json_if_any(self.directory / files.ENVIRONMENT).get("class_names", [])

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of training steps, in order; `pandas.DataFrame(run.history)` makes a table of them."""
        return self._records("train")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations, in order, each with `step`, `split`, `weights`, `tta`, `accuracy` and `loss`."""
        return self._records("eval")

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None if the run is not finished, or was continued."""
        from cifar_towers.reporting.run_records import read_run

        return read_run(self.directory, self.directory.name).result or None

    def model(self, **settings: Any) -> "keras.Model":
        """Return the model with its preprocessing: images [B, S, S, 3] of the training's size -> probabilities [B, C].

        Images are uint8 levels, probabilities float32.

        Args:
          **settings: `step` of the checkpoint (default: the newest), `weights` (`raw` or `ema`; default: the average if
            there is one), and `model`, which a net of your own needs.

        Raises:
          RunError: there is no such checkpoint, or it is damaged.
        """
        config = make_config(TrainedRunConfig, {"train_dir": self.directory, **settings})
        with tensorflow_imported():
            from cifar_towers.inference.export import load_portable_model

            return load_portable_model(config)

    def _records(self, kind: str) -> list[dict[str, Any]]:
        from cifar_towers import files
        from cifar_towers.reporting.run_records import read_records

        return [record for record in read_records(self.directory / files.METRICS) if record["kind"] == kind]
