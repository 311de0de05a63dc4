"""What a run tells of itself: to the terminal, in the files of its directory, and in TensorBoard."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from cifar_towers.config import TrainConfig
from cifar_towers.config.recipe import recipe_fields
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Dataset, Split
from cifar_towers.evaluation.score import Score
from cifar_towers.files import atomic_io, run_files
from cifar_towers.reporting import environment, figures, jsonl, tb_text
from cifar_towers.reporting.console import Progress, ProgressStatus
from cifar_towers.reporting.noise_scale import NoiseScale
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.resource_monitor import ResourceMonitor
from cifar_towers.reporting.tensorboard_writer import Summaries
from cifar_towers.towers import Tower, placement_report
from cifar_towers.training import diagnostics
from cifar_towers.training.health import DivergenceState
from cifar_towers.training.results import PROXY, StepMetrics
from cifar_towers.training.state import TrainState

SCALARS_PER_SUMMARY = 10  # how many times as often scalars and records come as whole summaries
DRAWING_SHARE = 0.02  # of the time, that pictures of evaluations may take


class RunLogger:
    """All that is told of one run.

    Args:
      banner: what is to be said of data that is not real; else empty.
      devices: what the batch, or the model, is split over. towers: what the step has; one where the model is split.
      precision: what the towers compute in.
      quiet: says nothing and writes no more than records, as another process reports the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        banner: str,
        devices: Sequence[Tower],
        towers: Sequence[Tower],
        precision: str,
        state: TrainState,
        length: RunLength,
        clock: PhaseTimer,
        quiet: bool = False,
    ):
        self.config, self.dataset, self.banner, self.clock = config, dataset, banner, clock
        self.devices, self.towers, self.precision, self.state = devices, towers, precision, state
        self.length, self.quiet = length, quiet
        self.directory = config.directory
        self.progress = Progress(length, quiet=quiet)
        self.say = self.progress.log
        self._usage = ResourceMonitor(devices)
        self._layers = [layer.name for layer in diagnostics.activation_layers(state.model)]
        self._weights = [variable.path for variable in state.model.trainable_variables]
        self._noise_scale = NoiseScale(config.batch_size)
        self._epoch: list = []
        self._drawn, self._drawing = -math.inf, 0.0  # when an evaluation was last drawn, and the seconds it took

    # The start ---------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Says what will be trained."""
        if self.banner:
            self.say(self.banner)
        config, parameters = self.config, sum(v.shape.num_elements() for v in self.state.weights)
        self.say(
            f"{config.name} seed {config.seed}: {config.model}, {parameters:,} trained parameters, "
            f"{self.precision}; {self.describe_parallelism()}"
        )
        hardest = f", the hardest of {config.hard_example_pool}" if config.hard_example_pool else ""
        self.say(
            f"{self.dataset.name}: {len(self.dataset.train.labels):,} training images; {self.length.last} steps of "
            f"{config.batch_size}{hardest}, {self.length.steps_per_epoch} an epoch; writing to {self.directory}"
        )

    def begin(self, step: int) -> None:
        """Opens the files, which hold nothing of after `step`, and writes into them what the run is."""
        self.metrics = jsonl.JsonlWriter(self.directory)
        self.summaries = _NoSummaries() if self.quiet else Summaries(self.directory, self.towers)
        self.go_back(step)
        settings = dataclasses.asdict(self.config)
        side = self.config.crop or self.dataset.info.side
        made_of = environment.describe_run(
            self.towers, self.precision, self.dataset, self.banner, self.state.model, self.state.named_variables(), side
        )
        self._unwritten = {run_files.CONFIG: settings, run_files.ENVIRONMENT: made_of}
        self._write_what_it_is()
        shown = recipe_fields(self.config) | {"seed": self.config.seed, "towers": len(self.towers)}
        shown |= {"strategy": self.config.strategy, "precision": self.precision, "dataset": self.dataset.name}
        self.summaries.begin(step, shown, tb_text.run_texts(settings, made_of, self.banner))

    def graph(self, function) -> None:
        """Draws the traced step, and says where it went if that was asked for."""
        self.summaries.graph(function)
        if self.config.log_device_placement:
            self.say(placement_report(function, self.towers))

    # Now and then ------------------------------------------------------------------------------------------------

    def go_back(self, step: int) -> None:
        """Drops what is on record of the steps after `step`."""
        self._epoch = []
        self.metrics.keep(lambda record: record["step"] <= step)
        self.summaries.keep(step, step if self.evaluated(step) else step - 1)
        self._noise_scale = NoiseScale(self.config.batch_size)
        for record in self.metrics.records("train"):
            if "gradient_noise_scale" in record and record["gradient_norm"] is not None:
                self._noise_scale.update(record["towers"]["gradient_norm"], record["gradient_norm"])

    def evaluated(self, step: int) -> list[dict]:
        """What is on record of the evaluations after `step`, as `evaluation` returned it."""
        return [record for record in self.metrics.records("eval") if record["step"] == step]

    def drop_evaluation(self, step: int) -> None:
        """Drops what is on record of an evaluation after `step` that is to be made again."""
        if self.evaluated(step):
            self.metrics.keep(lambda record: (record["kind"], record["step"]) != ("eval", step))
            self.summaries.keep(step, step - 1)

    def wants_diagnostics(self, step: int) -> bool:
        """Whether the step that makes `step` of them is to be looked at closely."""
        return is_due(step, self.config.summary_every_steps) or step == self.length.last

    def step(
        self, step: int, metrics: StepMetrics, rates: Mapping[str, float], side: int, health: DivergenceState
    ) -> None:
        """After `step` steps, of which `metrics` is the last's; rates by parameter group."""
        self._epoch.append(metrics)
        rate, speed = next(iter(rates.values())), self.clock.recent_rate()
        self.progress.step(ProgressStatus(step, metrics.loss, metrics.accuracy, rate, speed))
        period = math.ceil(self.config.summary_every_steps / SCALARS_PER_SUMMARY)
        has_diagnostics = self.wants_diagnostics(step)
        if not has_diagnostics and not is_due(step, period):
            return
        alike = self._alike(metrics) if has_diagnostics else {}
        self.metrics.write(
            kind="train",
            step=step,
            epoch=step / self.length.steps_per_epoch,
            loss=metrics.loss,
            accuracy=metrics.accuracy,
            images_per_sec=speed,
            input_wait=self.clock.recent_wait(),
            learning_rate=rate,
            gradient_norm=metrics.gradient_norm,
            image_side=side,
            bad_steps=health.bad_steps,
            **alike,
        )
        scalars = {"loss": metrics.loss, "accuracy": metrics.accuracy, "health/gradient_norm": metrics.gradient_norm}
        scalars |= {f"losses/{term} (raw)": loss for term, loss in metrics.losses.items()}
        scalars |= {f"losses/{term}": loss for term, loss in metrics.smoothed_losses.items()}
        scalars |= {f"learning_rate/{name}": value for name, value in rates.items()}
        scalars |= {"health/bad_steps": health.bad_steps, "health/rollbacks": health.rollbacks}
        if metrics.hard_examples:
            scalars |= {f"{PROXY}/{name}": getattr(metrics.hard_examples.proxy, name) for name in ("loss", "accuracy")}
        if speed:
            scalars |= {"speed/images_per_sec": speed, "speed/step_seconds": self.config.batch_size / speed}
            scalars |= {"speed/input_wait": self.clock.recent_wait()}
        if has_diagnostics:
            scalars |= {"health/loss_scale": metrics.diagnostics.loss_scale, **self._usage()}
            scalars["towers/gradient_noise_scale"] = alike.get("gradient_noise_scale")
        self.summaries.training(step, scalars)
        if has_diagnostics:
            self._close_up(step, metrics, alike)

    def end_epoch(self, step: int, rates: Mapping[str, float], scores: Sequence[dict]) -> None:
        """The means over an epoch, or what there is of it, and the scores at its end."""
        good = [m for m in self._epoch if m.finite] or self._epoch
        loss, accuracy = (float(np.mean([getattr(m, name) for m in good])) for name in ("loss", "accuracy"))
        status = ProgressStatus(step, loss, accuracy, next(iter(rates.values())), self.clock.recent_rate())
        self.progress.epoch(status, [told(score) for score in scores])
        self._epoch = []

    def evaluation(
        self, step: int, scores: Sequence[tuple[str, str, int, Score]], splits: Mapping[str, Split], final: bool
    ) -> list[dict]:
        """Records and shows scores after `step`: (split, weights, level of test-time augmentation, score); of the last
        of them each class too, and pictures, if this is the `final` evaluation or drawing them takes little of the
        time. As records, which are returned."""
        found = []
        for name, weights, level, score in scores:
            numbers = {"count": score.count, "accuracy": score.accuracy, "loss": score.loss}
            if len(score.confusion) <= figures.MAX_CLASSES:
                numbers["confusion"] = score.confusion.tolist()
            found.append({"split": name, "weights": weights, "tta": level} | numbers)
            self.metrics.write(kind="eval", step=step, epoch=step / self.length.steps_per_epoch, **found[-1])
            which = score_tag(**found[-1])
            self.summaries.evaluation(step, which, score)
        self._write_what_it_is()
        if self.quiet:
            return found
        split, names = splits[name], self.dataset.info.class_names
        self.summaries.classes(step, which, score, split, names)
        start = time.monotonic()
        if final or start - self._drawn >= self._drawing / DRAWING_SHARE:
            self._draw(step, which, score, split, names)
            self._drawn = time.monotonic()
            self._drawing = self._drawn - start
        return found

    # The end -----------------------------------------------------------------------------------------------------

    def log_result(self, result: Mapping) -> None:
        """Says what the run came to, before anything that can fail."""
        self.progress.pause()
        for score in result["evaluations"]:
            self.say(told(score))
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
        self.say(
            f"step {result['step']}: {spent}; {result['images_per_sec']:,.0f} images/s; "
            f"weights sha256 {result['weights_sha256'][:16]}"
        )
        if self.banner:
            self.say(self.banner)

    def result(self, result: Mapping) -> None:
        """Writes what the run came to, and says what went wrong on the way."""
        if result["failed_saves"]:
            self.say(f"{result['failed_saves']} checkpoints could not be saved when they were due")
        if result["bad_steps"]:
            self.say(f"{result['bad_steps']} steps made no update, {result['rollbacks']} rollbacks")
        self._write_what_it_is()
        with jsonl.best_effort_writes(self.directory / run_files.RESULT):
            run_files.write_json(self.directory / run_files.RESULT, result)
        final = {f"accuracy/{score_tag(**score)}": score["accuracy"] for score in result["evaluations"]}
        final |= {"images_per_sec": result["images_per_sec"], "training_seconds": self.clock.training_seconds}
        self.summaries.end(result["step"], final)
        self.say(f"written to {self.directory}; look at it with: make tensorboard")

    def close(self) -> None:
        """Puts everything where it will be found, and takes the live line away."""
        self.progress.pause()
        self.summaries.flush()

    # Parts -------------------------------------------------------------------------------------------------------

    def _write_what_it_is(self) -> None:
        """config.json and environment.json, unless they have been written; without them nobody can use the run."""
        for name, content in list(self._unwritten.items()):
            with jsonl.best_effort_writes(self.directory / name):
                run_files.write_json(self.directory / name, content)
                del self._unwritten[name]

    def _alike(self, metrics: StepMetrics) -> dict:
        """How alike the towers are in a step that was looked at: for the record."""
        norms = metrics.diagnostics.tower_gradients.norm / metrics.diagnostics.loss_scale
        alike = {
            "towers": {
                "loss": metrics.tower_losses.tolist(),
                "gradient_norm": norms.tolist(),
                "cosine": metrics.diagnostics.tower_gradients.cosine.tolist(),
            }
        }
        if (
            len(norms) == 1 or not metrics.finite or metrics.hard_examples
        ):  # the estimate is for examples drawn at random
            return alike
        scale = self._noise_scale.update(norms.tolist(), float(metrics.gradient_norm))
        return alike | {"gradient_noise_scale": scale}

    def _close_up(self, step: int, metrics: StepMetrics, alike: dict) -> None:
        """What the step that was looked at adds for TensorBoard; nothing where its numbers are no numbers."""
        self.summaries.towers(step, alike["towers"])
        if not metrics.finite:
            return
        forward = metrics.diagnostics.forward
        labels = [self.dataset.info.class_names[label] for label in forward.labels]
        self.summaries.images(step, "input/augmented", self.denormalize(forward.images), labels)
        self.summaries.activations(step, self._layers, forward.activations)
        self.summaries.update(step, self._weights, metrics.diagnostics.update)

    def _draw(self, step: int, which: str, score: Score, split: Split, names: Sequence[str]) -> None:
        """What a score fails at, as pictures: in TensorBoard, and the most confident mistakes as a file too."""
        captions = [
            f"{names[predicted]} {100 * confidence:.0f} %\nis {names[split.labels[example]]}"
            for example, predicted, confidence in zip(*score.mistakes, strict=True)
        ]
        sheet = figures.image_grid(
            split.images[score.mistakes.examples], captions, f"most confident mistakes, {which}, step {step}"
        )
        with jsonl.best_effort_writes(self.directory / run_files.MISTAKES):
            atomic_io.write_whole(self.directory / run_files.MISTAKES, figures.png(sheet))
        self.summaries.failures(step, which, score, split, names, sheet)

    def denormalize(self, images: np.ndarray) -> np.ndarray:
        """[n, side, side, 3] as the net sees them -> levels 0..255, the colours they had or, where each image is
        normalised by itself, from its darkest to its brightest."""
        if self.config.standardize == "dataset":
            levels = images * self.dataset.info.std + np.array(self.dataset.info.mean)
        else:
            low, high = (f(images, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
            levels = 255 * (images - low) / np.maximum(high - low, 1e-6)
        return np.clip(np.round(levels), 0, 255).astype(np.uint8)

    def describe_parallelism(self) -> str:
        """Who works on what, as `2 towers of 768 images on /CPU:0, /CPU:1`."""
        config, devices = self.config, ", ".join(tower.device for tower in self.devices)
        if config.strategy == "multi_worker":
            devices = f"{len(self.towers) // len(self.devices)} workers"
        images = config.batch_size // len(self.towers) // config.micro_batches
        shared = f"{len(self.towers)} tower{'s' * (len(self.towers) > 1)} of "
        shared += f"{config.micro_batches} x " if config.micro_batches > 1 else ""
        shared += f"{images} images " + (f"in {len(self.devices)} stages " if config.parallelism == "model" else "")
        return shared + f"on {devices}" + (", mirrored" if config.strategy == "mirrored" else "")


def told(score: Mapping) -> str:
    """A score's record in words."""
    return (
        f"{score['split']} {100 * score['accuracy']:.2f} % "
        f"({score['weights']} weights, TTA {score['tta']}, {score['count']:,} images)"
    )


def score_tag(split: str, weights: str, tta: int, **_) -> str:
    """What a score is of, as tags have it."""
    return f"{split}/{weights}" + (f"_tta{tta}" if tta else "")


class _NoSummaries:
    """Stands in where another process writes them: takes all, writes nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def is_due(step: int, period: int) -> bool:
    """Whether this is a step of one in every `period`; none is where that is 0."""
    return period > 0 and step % period == 0
