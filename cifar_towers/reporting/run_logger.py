"""Everything a run tells of itself: on the terminal, in JSON files, in TensorBoard, and to the
user's callbacks.
"""

import contextlib
import dataclasses
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from cifar_towers import files
from cifar_towers.config import TrainConfig, parse_profile_steps
from cifar_towers.config.train_config import code_digests, recipe_fields
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.errors import count
from cifar_towers.evaluation.score import Evaluation, describe_score, reported_score, score_name
from cifar_towers.hardware import available_cores, gpu_names, processor_name
from cifar_towers.registry import split_path
from cifar_towers.reporting import figures
from cifar_towers.reporting.console import Progress, ProgressStatus, format_seconds
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds
from cifar_towers.reporting.records import JsonlWriter, format_rate, tower_scalars
from cifar_towers.reporting.smoothed_losses import SmoothedLosses
from cifar_towers.reporting.tensorboard_writer import EVAL, TRAIN, TensorBoardWriter
from cifar_towers.towers import Tower, placement_report
from cifar_towers.training.diagnostics import StepDiagnostics
from cifar_towers.training.losses import EXAMPLE_LOSS
from cifar_towers.training.optimizers import main_rate
from cifar_towers.training.runner import FinishedStep
from cifar_towers.training.setup import RunSetup
from cifar_towers.training.step import StepMetrics

PACKAGES = (
    "cifar-towers",
    "tensorflow",
    "keras",
    "tensorflow-datasets",
    "tensorboard",
    "numpy",
    "absl-py",
)
SCALARS_PER_SUMMARY = 10  # scalars are written this many times as often as whole summaries
RECORDED = {  # key of a training record in metrics.jsonl -> tag of the same value in TensorBoard
    "loss": "loss",
    "accuracy": "accuracy",
    "gradient_norm": "health/gradient_norm",
    "skipped_steps": "health/skipped_steps",
    "images_per_sec": "speed/images_per_sec",
    "input_wait": "speed/input_wait",
}
# keys of an evaluation's record, and beginnings of their tags
EVALUATED = ("accuracy", "loss", "ece")


class RunLogger:
    """The log of one run. On workers other than worker 0, which reports the run, nothing is printed
    or drawn.

    Args:
      directory: of the run, absolute: code of the user's may change the current directory.
    """

    def __init__(self, setup: RunSetup, directory: Path, model: keras.Model, timer: PhaseTimer):
        self.setup = setup
        self.model = model
        self.timer = timer
        self.config = setup.config
        self.length = setup.length
        self.directory = directory
        self.quiet = not setup.workers.is_chief
        self.progress = Progress(setup.length, quiet=self.quiet)
        self.log = self.progress.log
        self.metrics = JsonlWriter(self.directory)
        self.tensorboard = TensorBoardWriter(self.directory)
        self.smoothed_losses = SmoothedLosses()  # of the final tower
        self._epoch: list[StepMetrics] = []
        self.saved_step = 0  # the newest checkpoint since the last epoch; 0: none
        self._unwritten: dict[str, dict] = {}  # file name -> content
        self._profile_errors = files.BestEffortWrites(
            self.directory / TRAIN, (OSError, tf.errors.OpError)
        )
        self._is_profiled = False  # whether a trace is running

    def log_start(self) -> None:
        """Print what will be trained."""
        config = self.config
        dataset = self.setup.dataset
        num_towers = len(self.setup.towers)
        trainable = sum(math.prod(variable.shape) for variable in self.model.trainable_variables)
        parts = f" in {config.micro_batches} micro-batches" if config.micro_batches > 1 else ""
        devices = ", ".join(tower.device for tower in self.setup.local_towers)
        if self.setup.workers.size > 1:
            devices = f"{self.setup.workers.size} workers, here {devices}"
        share = f"{config.batch_size // num_towers} images{parts}"
        self.log(
            f"{config.name} seed {config.seed}: {config.model}, {self.model.count_params():,} "
            f"parameters ({trainable:,} trainable), {self.setup.precision}; "
            f"{count(num_towers, 'tower')} of {share} on {devices} (strategy {config.strategy})"
        )
        images = count(len(dataset.train.labels), "training image")
        steps = count(self.length.last, "step")
        steps_per_epoch = count(self.length.steps_per_epoch, "step")
        self.log(
            f"{dataset.name}: {images}; {steps} of {config.batch_size:,} images, "
            f"{steps_per_epoch} per epoch; writing to {config.directory}"
        )

    def open(self, step: int, lineage: Sequence[str]) -> None:
        """Open the files of a run that starts or resumes at `step`, and write its settings and
        environment, with the `lineage` of its weights.
        """
        kept = step or -1  # a start that was aborted at step 0 may have had other settings
        self.metrics.keep(lambda record: record["step"] <= kept)
        if step < self.length.last:  # a run that ended earlier is continued
            with files.BestEffortWrites(self.directory / files.RESULT):
                (self.directory / files.RESULT).unlink(missing_ok=True)
        self._unwritten = {
            files.CONFIG: dataclasses.asdict(self.config),
            files.ENVIRONMENT: describe_run(self.setup) | {"lineage": list(lineage)},
        }
        self._write_unwritten()
        if step == 0:
            hparams = recipe_fields(self.config) | {"strategy": self.config.strategy}
            hparams |= {"towers": len(self.setup.towers), "precision": self.setup.precision}
            self.tensorboard.start(hparams | {"dataset": self.setup.dataset.name})

    def close(self) -> None:
        """Write the trace of the steps so far, if one is running, and remove the live line."""
        if self._is_profiled:
            self._is_profiled = False
            with self._profile_errors:
                tf.profiler.experimental.stop()
        self.progress.pause()

    def is_profile_bound(self, step: int) -> bool:
        """Return whether the trace of --profile_steps begins or ends after `step`."""
        return step in (parse_profile_steps(self.config.profile_steps) or ())

    def profile(self, step: int) -> None:
        """Begin the trace of --profile_steps, for TensorBoard's tab PROFILE, if `step` is its
        start; or end it.
        """
        first, last = parse_profile_steps(self.config.profile_steps) or (-1, -1)
        if first == step < self.length.last and not self.quiet:
            with self._profile_errors:
                tf.profiler.experimental.start(str(self.directory / TRAIN))
                self._is_profiled = True
        elif step == last:
            self.close()

    def log_graph(self, function: tf.types.experimental.ConcreteFunction) -> None:
        """Draw the traced step in TensorBoard, and print its devices with
        --log_device_placement.
        """
        self.tensorboard.write_graph(function)
        if self.config.log_device_placement:
            self.log(placement_report(function, self.setup.towers))

    def is_summary_step(self, step: int) -> bool:
        """Return whether step `step` is a summary step."""
        return _is_due(step, self.config.summary_every_steps) or step == self.length.last

    def log_step(
        self, finished: FinishedStep, diagnostics: StepDiagnostics | None, skipped_steps: int
    ) -> dict[str, Any] | None:
        """Show a step, and record it with its diagnostics, if any. Return the record; None if none
        was due.

        The record is made once. metrics.jsonl takes it whole, TensorBoard its numbers.
        """
        step = finished.step
        metrics = finished.metrics
        self._epoch.append(metrics)
        if metrics.updated:
            self.smoothed_losses.update(metrics.losses)
        rate = main_rate(finished.rates)
        self.progress.step(self._status(step, metrics.loss, metrics.accuracy, rate))

        scalar_period = math.ceil(self.config.summary_every_steps / SCALARS_PER_SUMMARY)
        if not diagnostics and not _is_due(step, scalar_period):
            return None

        record = self._make_record(finished, diagnostics, skipped_steps)
        self.metrics.write(kind="train", **record)
        scalars = self._make_scalars(record, finished)
        if diagnostics:
            scalars |= memory_usage(self.setup.local_towers)
        self.tensorboard.write(TRAIN, step, scalars)
        if diagnostics and metrics.updated and not self.quiet:
            self._write_diagnostics(step, diagnostics)
        return record

    def _make_record(
        self, finished: FinishedStep, diagnostics: StepDiagnostics | None, skipped_steps: int
    ) -> dict[str, Any]:
        """Return the record of a step in metrics.jsonl, which callbacks get too."""
        metrics = finished.metrics
        images_per_sec, input_wait = self.timer.recent_rates()
        record = {
            "step": finished.step,
            "epoch": finished.step / self.length.steps_per_epoch,
            "loss": metrics.loss,
            "accuracy": metrics.accuracy,
            "images_per_sec": images_per_sec,
            "input_wait": input_wait,
            "learning_rate": main_rate(finished.rates),
            "gradient_norm": metrics.gradient_norm,
            "image_size": finished.image_size,
            "skipped_steps": skipped_steps,
        }
        if diagnostics:
            record["towers"] = {
                "loss": metrics.tower_losses.tolist(),
                "gradient_norm": diagnostics.tower_gradient_norm.tolist(),
                "cosine": diagnostics.tower_gradient_cosine.tolist(),
            }
        return record

    def _make_scalars(self, record: Mapping[str, Any], finished: FinishedStep) -> dict[str, float]:
        """Return the numbers of a step by their tags in TensorBoard: those of its record, then
        those that only TensorBoard shows.
        """
        scalars = {tag: record[key] for key, tag in RECORDED.items() if record[key] is not None}
        if len(self.setup.towers) > 1:
            scalars |= tower_scalars(record)

        if record["images_per_sec"]:
            scalars["speed/step_seconds"] = self.config.batch_size / record["images_per_sec"]
        for group, rate in finished.rates.items():
            scalars[f"learning_rate/{group}"] = rate
        for term, loss in finished.metrics.losses.items():
            scalars[f"losses/{self._loss_name(term)} (raw)"] = loss
        for term, loss in self.smoothed_losses.averages().items():
            scalars[f"losses/{self._loss_name(term)}"] = loss
        return scalars

    def _loss_name(self, term: str) -> str:
        """Return what a loss term is called in TensorBoard: a user's loss by its function."""
        if term != EXAMPLE_LOSS:
            return term
        _, _, function = self.config.loss.rpartition(":")
        return function or "cross_entropy"

    def log_epoch(self, step: int, rates: Mapping[str, float], scores: Sequence[dict]) -> None:
        """Print the means over an epoch, or its part in this process, and the scores at its end."""
        counted = [metrics for metrics in self._epoch if metrics.updated]
        if not counted:
            counted = self._epoch
        loss = float(np.mean([metrics.loss for metrics in counted]))
        accuracy = float(np.mean([metrics.accuracy for metrics in counted]))
        self.progress.epoch(self._status(step, loss, accuracy, main_rate(rates)))
        if len(self._epoch) <= (step - 1) % self.length.steps_per_epoch:
            self.log(f"  (mean of the {count(len(self._epoch), 'step')} since the resume)")
        for score in scores:
            self.log(f"  {describe_score(score)}")
        self._epoch = []
        self.saved_step = 0

    def _status(self, step: int, loss: float, accuracy: float, rate: float) -> ProgressStatus:
        images_per_sec, _ = self.timer.recent_rates()
        images_left = (self.length.last - step) * self.config.batch_size
        seconds_left = images_left / images_per_sec if images_per_sec else None
        return ProgressStatus(
            step, loss, accuracy, rate, images_per_sec, seconds_left, self.saved_step
        )

    def log_evaluation(
        self, step: int, evaluations: Sequence[Evaluation], splits: Mapping[str, Split], final: bool
    ) -> list[dict]:
        """Write the evaluations after `step`, and return their records. Draw the `final` one that
        the run reports.
        """
        records = [evaluation_record(evaluation) for evaluation in evaluations]
        epoch = step / self.length.steps_per_epoch
        seconds = training_seconds(self.timer.seconds)
        for record in records:
            self.metrics.write(
                kind="eval", step=step, epoch=epoch, training_seconds=seconds, **record
            )
            scalars = {f"{key}/{score_name(record)}": record[key] for key in EVALUATED}
            self.tensorboard.write(EVAL, step, scalars)
        self._write_unwritten()

        if final and not self.quiet:
            reported = reported_score(records)
            for evaluation, record in zip(evaluations, records, strict=True):
                if record is reported:
                    self._draw(step, evaluation, splits[evaluation.split])
        return records

    def begin_final_evaluation(self, step: int, splits: Mapping[str, Split]) -> None:
        """Print what will be evaluated, as that may take minutes, and forget evaluations after
        `step`, if any.
        """
        self.progress.pause()
        counts = [count(len(split.labels), f"{name} image") for name, split in splits.items()]
        images = " and ".join(counts)
        tta = ", without and with TTA" if self.config.tta else ""
        self.log(f"evaluating on {images}{tta}")
        self.forget_evaluations(step)

    def forget_evaluations(self, step: int) -> None:
        """Remove the records of evaluations after `step`."""
        self.metrics.keep(lambda record: (record["kind"], record["step"]) != ("eval", step))

    def log_result(self, result: Mapping[str, Any]) -> None:
        """Print the result, before anything that can fail; the score that the run reports comes
        last.
        """
        self.progress.pause()
        reported = reported_score(result["evaluations"])
        for score in result["evaluations"]:
            if score is not reported:
                self.log(describe_score(score))
        total = format_seconds(sum(result["seconds"].values()))
        phases = result["seconds"].items()
        seconds = [f"{phase} {duration:.0f} s" for phase, duration in phases if duration >= 0.5]
        self.log(f"step {result['step']} after {total}: {', '.join(seconds)}")
        rate = result["images_per_sec"]
        speed = f"{format_rate(rate)} images/s" if rate else "too few steps to time"
        self.log(f"{speed}; weights sha256 {result['weights_sha256'][:16]}")
        if reported:
            self.log(f"result: {self.setup.dataset.name} {describe_score(reported)}")

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json and the run's row in HPARAMS; print what failed on the way."""
        if result["failed_saves"]:
            self.log(f"{count(result['failed_saves'], 'checkpoint')} could not be saved when due")
        if result["skipped_steps"]:
            self.log(f"skipped {count(result['skipped_steps'], 'step')} with NaN or infinity")
        self._write_unwritten()
        with files.BestEffortWrites(self.directory / files.RESULT):
            files.write_json(self.directory / files.RESULT, result)
        final = {"final/training_seconds": training_seconds(result["seconds"])}
        if result["images_per_sec"]:
            final["final/images_per_sec"] = result["images_per_sec"]
        self.tensorboard.write(EVAL, result["step"], final)
        self.log(f"written to {self.config.directory}; next:")
        for line in next_commands(self.config):
            self.log(f"  {line}")

    def _write_unwritten(self) -> None:
        """Write config.json and environment.json, unless they are written: nobody can use the run
        without them.
        """
        for name, content in list(self._unwritten.items()):
            with files.BestEffortWrites(self.directory / name):
                files.write_json(self.directory / name, content)
                del self._unwritten[name]

    def _write_diagnostics(self, step: int, diagnostics: StepDiagnostics) -> None:
        """Write the images and histograms of a summary step that was not skipped."""
        info = self.setup.dataset.info
        labels = [info.class_names[label] for label in diagnostics.labels]
        of_dataset = self.config.standardize == "dataset"
        levels = denormalize(diagnostics.images, info if of_dataset else None)
        picture = figures.image_grid(levels, labels, columns=4)
        self.tensorboard.write_diagnostics(step, picture, diagnostics)

    def _draw(self, step: int, evaluation: Evaluation, split: Split) -> None:
        """Draw the most confident mistakes and the confusion matrix, as files and in TensorBoard.

        There is no picture of the confusion matrix of more than `figures.MAX_CLASSES` classes.
        """
        score = evaluation.score
        names = self.setup.dataset.info.class_names
        captions = []
        for index in score.mistakes:
            probabilities = score.probabilities[index]
            predicted = names[probabilities.argmax()]
            certainty = f"{100 * probabilities.max():.0f} %"
            label = names[split.labels[index]]
            captions.append(f"{predicted} {certainty}\nis {label}\n{split.describe(index)}")
        title = f"{score_name(evaluation._asdict())}, step {step}"
        grid = figures.image_grid(
            split.images[score.mistakes], captions, f"most confident mistakes, {title}"
        )
        pictures = {"mistakes": (files.MISTAKES, grid)}
        if len(names) <= figures.MAX_CLASSES:
            matrix = figures.confusion_matrix(score.confusion, names, title)
            pictures["confusion"] = (files.CONFUSION, matrix)
        for tag, (file, picture) in pictures.items():
            with files.BestEffortWrites(self.directory / file):
                files.write_whole(self.directory / file, picture)
            self.tensorboard.write(EVAL, step, {}, {f"{tag}/{evaluation.split}": picture})


def denormalize(images: np.ndarray, info: DatasetInfo | None) -> np.ndarray:
    """Convert normalized images [n, size, size, 3] to levels 0..255 of uint8.

    Without `info`, as for images that were normalized one by one, stretch the range of each image
    to 0..255.
    """
    if info:
        levels = images * info.std + info.mean
    else:
        levels = images - images.min((1, 2, 3), keepdims=True)
        levels *= 255 / np.maximum(levels.max((1, 2, 3), keepdims=True), 1e-6)
    return np.clip(np.round(levels), 0, 255).astype(np.uint8)


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


# Values of records, and what environment.json says of the run and its machine ---------------------


def evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return the record of an evaluation in metrics.jsonl and result.json. Large confusion matrices
    are left out.
    """
    score = evaluation.score
    record = {
        "split": evaluation.split,
        "weights": evaluation.weights,
        "tta": evaluation.tta,
    } | score.record()
    if len(score.confusion) <= figures.MAX_CLASSES:
        record["confusion"] = score.confusion.tolist()
    return record


def describe_run(setup: RunSetup) -> dict[str, Any]:
    """Return the content of environment.json: machine, software, devices and data of a run."""
    return {
        **describe_machine(),
        "towers": [{"name": tower.name, "device": tower.device} for tower in setup.towers],
        "precision": setup.precision,
        "gpus": gpu_names(),
        "data_sha256": setup.dataset.digests(),
        "code_sha256": code_digests(setup.config),
        "class_names": list(setup.dataset.info.class_names),
    }


def describe_machine() -> dict[str, Any]:
    """Return command, versions, processor and git revision of this process."""
    program_name, *arguments = sys.argv
    if program_name.endswith("__main__.py"):
        program_name = "cifar-towers"
    return {
        "command": [program_name, *arguments],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": available_cores(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as TensorFlow chooses"),
        "git_revision": _git_revision(),
    }


def next_commands(config: TrainConfig) -> list[str]:
    """Return what to type after a training."""
    run = [f"--train_dir={config.directory}"]
    if config.user_model:
        run.append(f"--model={config.model}")

    data = []
    prefix, _ = split_path(config.dataset)
    if prefix:  # where the files are now
        data.append(f"--dataset={config.dataset}")
    if config.data_dir and config.dataset != "synthetic":  # which is read from no directory
        data.append(f"--data_dir={config.data_dir}")

    commands = (
        [program("tensorboard"), f"--logdir={config.directory}"],
        [program("cifar-towers"), "evaluate", *run, *data],
        [program("cifar-towers"), "predict", *run, "picture.jpg"],
    )
    return [shlex.join(words) for words in commands]


def program(name: str) -> str:
    """Return what to type for a program of this environment: its name, or its path if the shell
    does not find it.
    """
    if shutil.which(name):
        return name
    return os.path.join(os.path.relpath(Path(sys.executable).parent), name)


def memory_usage(towers: Sequence[Tower]) -> dict[str, float]:
    """Return `memory/host_mb`, and the peak memory of each GPU in MB, as `memory/GPU:0_mb`."""
    values = {"memory/host_mb": psutil.Process().memory_info().rss / 1e6}
    gpus = {tower.device.removeprefix("/") for tower in towers if "GPU" in tower.device}
    for gpu in sorted(gpus):
        values[f"memory/{gpu}_mb"] = tf.config.experimental.get_memory_info(gpu)["peak"] / 1e6
    return values


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():  # an installed copy may stand inside another project's repository
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(
                ["git", "-C", str(root), "describe", "--always", "--dirty"],
                text=True,
                stderr=subprocess.DEVNULL,
            ).strip()
    return "unknown"
