"""One training run from top to bottom: build, open, loop, finish."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from cifar_towers.callbacks import Callbacks
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import recipe_fields
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.errors import DivergedError, Interrupted, RunError, UsageError, error_line, listed
from cifar_towers.evaluation.evaluator import Classifier, Evaluator
from cifar_towers.hardware import describe_processor, gpu_names
from cifar_towers.models.keras_models import finish_restoring
from cifar_towers.multi_worker import coordination
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds
from cifar_towers.reporting.run_logger import RunLogger
from cifar_towers.runs.checkpoint import find_checkpoint, read_checkpoint
from cifar_towers.runs.directory import (
    RunDirectory,
    assign,
    code_facts,
    describe_changed_facts,
)
from cifar_towers.signals import StopSignals
from cifar_towers.training import build
from cifar_towers.training.diagnostics import Diagnoser, Health, StepDiagnostics
from cifar_towers.training.runner import FinishedStep, StepInput, StepRunner
from cifar_towers.training.setup import RunSetup, library_versions, make_setup
from cifar_towers.training.state import weights_sha256

HOW_TO_RESUME = "the same command resumes, without --overwrite"  # how messages end


def train(
    config: TrainConfig,
    source: sources.Source,
    directory: RunDirectory,
    signals: StopSignals,
    cluster: Workers | None,
    callbacks: Callbacks,
    timer: PhaseTimer,
) -> dict:
    """Train or resume a run that is not finished, and return its result: the content of
    result.json.

    Args:
      directory: as `open_run` yields it; on a cluster, only that of worker 0 is kept.
      signals: if one is received during the steps, the run is saved and ends.
      cluster: the workers to train with; None: this process alone.
      callbacks: functions and objects of the user's that are called during the run.
      timer: the timer that runs since the program started.

    Raises:
      Interrupted: after a signal.
      UsageError: the settings do not fit this machine, model or data set.
      RunError: the last step could not be saved, or workers end with different weights. Others: see
        `cifar_towers.errors`.
    """
    with coordination.connect(cluster, lambda: build.make_run_devices(config, cluster)) as (
        workers,
        devices,
    ):
        setup = make_setup(config, source, devices, workers)
        with callbacks.until_end():
            training = Training(setup, directory, signals, callbacks, timer)
            with signals.recorded(), training.opened() as first_step:
                step = train_from(first_step, training)
                saved = training.save_now(step, wait=True)
            if signals.received and workers.size == 1:  # while the last step was saved
                training.stop_signal = signals.received
                training.save_early(step)
            return finish(step, saved, training)


def train_from(step: int, training: "Training") -> int:
    """Train from `step` until the end, the target or a signal; return the finished steps.

    After an error the last finished step is saved, unless `save_after` says why not.

    Raises:
      Interrupted: after a signal; the last finished step is saved, or the message says that it is
        not.
      DivergedError: too many steps in a row were skipped, or a save found a non-finite variable.
    """
    try:
        if training.evaluator.is_due(step) and not training.evaluations:
            # the evaluation after the step that was saved had failed, or was the final one then
            training.logger.forget_evaluations(step)
            training.evaluate_now(step)
        training.note_target(step)
        if not training.reached:
            batches = training.batches.stream(step, training.length.last)
            for batch in training.timer.inputs(batches):
                finished = training.start_step(step, batch)
                step += 1

                training.check_and_log(finished)
                if training.evaluator.is_due(step):
                    training.evaluate_now(step)
                # then this step was awaited, and is the last of `finished`
                if training.ends_epoch(step):
                    training.logger.log_epoch(step, finished[-1].rates, training.evaluations)
                if training.should_save(step) and training.can_be_saved(step):
                    training.save_now(step)
                training.note_target(step)
                training.note_signal(finished)
                training.logger.profile(step)
                if training.reached or training.stop_signal:
                    break
        training.check_and_log(training.runner.finish())
    except (Exception, SystemExit) as error:
        training.save_after(error, step)
        raise
    if training.stop_signal:
        training.save_early(step)
    return step


def finish(step: int, saved: bool, training: "Training") -> dict:
    """Evaluate every split after the last step, and write the result; save the step if it is not
    `saved`.
    """
    training.logger.begin_final_evaluation(step, training.evaluator.splits)
    training.evaluate_now(step, final=True)
    training.note_target(step)
    training.check_weights_are_shared()
    result = {
        "step": step,
        "reached": training.reached or None,
        "dataset": training.setup.dataset.name,
        **training.timer.summary(),
        "weights_sha256": training.state.weights_sha256(),
        "failed_saves": training.directory.failed_saves,
        "skipped_steps": training.health.skipped_steps,
        "evaluations": training.evaluations,
    }
    training.logger.log_result(result)
    if not saved and not training.save_now(step):  # a last attempt: evaluation took a while
        raise RunError(
            f"the last step, {step}, could not be saved; make room on the disk, then "
            f"{HOW_TO_RESUME}"
        )
    training.logger.write_result(result)
    return result


def describe_experiment(setup: RunSetup) -> dict[str, Any]:
    """Return what repetitions of an experiment have in common besides recipe and data. A resumed
    run may differ in it, and says so; it is then no repetition of the others any more.
    """
    return {
        "precision": setup.precision,
        "towers": len(setup.towers),
        "strategy": setup.config.strategy,
        "jit_compile": setup.config.jit_compile,
        "deterministic": setup.config.deterministic,
        **code_facts(setup.config),
    }


def describe_platform() -> dict[str, Any]:
    """Return what the bits of a run depend on besides its experiment. A resumed run may differ in
    it, and says so.
    """
    return {
        # 0: as TensorFlow chooses
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "GPUs": ", ".join(gpu_names()),
        **library_versions(),
        "oneDNN": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
        "processor": describe_processor(),
    }


class Training:
    """One run in memory: the parts that train it, and what happens around a step.

    Attributes:
      variables: every variable that checkpoints hold, by name.
      experiment: what repetitions have in common; see `describe_experiment`.
      platform: what the bits depend on besides; see `describe_platform`.
      lineage: what else the weights come from: the weights of `init_from`, and each step from which
        the experiment was another.
      evaluations: records of the evaluations after the last step, if it was evaluated.
      unlogged: steps that have finished and are not logged yet.
      reached: the first accuracy that met the target; 0 until then.
      stop_signal: the signal that ends the run, on which a cluster's workers agree; 0 without one.
    """

    def __init__(
        self,
        setup: RunSetup,
        directory: RunDirectory,
        signals: StopSignals,
        callbacks: Callbacks,
        timer: PhaseTimer,
    ):
        self.setup = setup
        self.directory = directory
        self.signals = signals
        self.callbacks = callbacks
        self.timer = timer
        self.config = setup.config
        self.workers = setup.workers
        self.length = setup.length

        augmentation = build.make_training_augmentation(self.config, setup.dataset.info)
        self.batches = build.make_batches(
            self.config, setup.dataset.train, setup.rows, setup.local_towers
        )
        self.image_size_at = build.make_image_size_fn(self.config, self.length)
        self.state, train_step = build.make_training(setup, augmentation)
        self.runner = StepRunner(train_step)
        self.variables = self.state.named_variables()

        self.logger = RunLogger(setup, directory.path, self.state.model, timer)
        self.log = self.logger.log
        self.health = Health(setup.towers)
        self.diagnoser = Diagnoser(self.state.model, augmentation, setup.local_towers)
        self.evaluator = self.make_evaluator(augmentation)

        self.experiment = describe_experiment(setup)
        self.platform = describe_platform()
        self.lineage: list[str] = []
        self.evaluations: list[dict] = []
        self.unlogged: list[FinishedStep] = []
        self.reached = 0.0
        self.stop_signal = 0

    def make_evaluator(self, augmentation: Augmentation) -> Evaluator:
        """Return the evaluator of the run's splits, which classifies on the towers."""
        show_progress = functools.partial(self.logger.progress.activity, "evaluating")
        classifier = Classifier(
            self.state.model, self.setup.local_towers, augmentation, self.workers, show_progress
        )
        dataset = self.setup.dataset
        return Evaluator(
            classifier,
            {"validation": dataset.validation, "test": dataset.test},
            self.state.evaluated_weights(),
            self.config.evaluate_every_steps(self.length),
            self.length.last,
            self.config.tta,
        )

    # The start of a run

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Restore the run, and open its files; yield the number of finished steps. Afterwards end
        the live display.
        """
        self.logger.log_start()
        step = self.restore()
        self.check_weights_are_shared()
        self.directory.clear()
        self.workers.log(f"trains from step {step} to {self.length.last}")
        self.logger.open(step, self.lineage)
        self.callbacks.start()
        self.logger.profile(step)
        self.timer.end_start()
        if step == 0 and self.config.init_from:
            self.save_now(0)  # a run that resumes from it does not read `init_from`
        try:
            yield step
        finally:
            self.runner.close()
            self.logger.close()

    def restore(self) -> int:
        """Restore the checkpoint that the directory was opened with, or start with `init_from`;
        return its step.

        Raises:
          UsageError: the checkpoint or the run of `init_from` is of another model.
          DataError: the data set has other images than the run was trained on.
        """
        saved = self.workers.broadcast_from_chief(lambda: self.directory.saved)
        if not saved:
            if self.config.init_from:
                self.initialize(Path(self.config.init_from))
            return 0
        values, metadata = saved
        self.setup.dataset.check_unchanged(metadata, self.directory.path)
        assign(self.variables, values, self.directory.path)
        finish_restoring(self.state.model)
        self.timer.restore(metadata)
        self.health.restore(metadata)
        self.logger.smoothed_losses.restore(metadata)
        self.evaluations = metadata["evaluations"]
        step = metadata["step"]
        changes = describe_changed_facts(metadata["facts"], self.experiment | self.platform)
        since = (
            f"; since then: {', '.join(changes)}, which may change the result" if changes else ""
        )
        self.log(f"resuming from step {step}{since}")
        self.lineage = metadata["lineage"]
        if step:  # nothing was computed before step 0
            self.note_changed_experiment(step, metadata["facts"])
        return step

    def note_changed_experiment(self, step: int, facts: Mapping[str, Any]) -> None:
        """Add to the lineage what has changed in the experiment since a checkpoint with `facts`."""
        before = {name: value for name, value in facts.items() if name not in self.platform}
        changes = describe_changed_facts(before, self.experiment)
        if changes:
            self.lineage.append(f"from step {step}: {', '.join(changes)}")

    def check_weights_are_shared(self) -> None:
        """Raise RunError if workers have different weights, e.g. loaded from files of their own."""
        if self.workers.size > 1:
            digest = {"the SHA-256 of the weights": self.state.weights_sha256()}
            difference = self.workers.describe_difference(digest)
            if difference:
                raise RunError(f"the workers have different weights: {difference}")

    def initialize(self, source: Path) -> None:
        """Start with the newest weights of another run: those of equal name and shape. Log which
        others are new.

        The weights are the moving averages of the other run if it keeps any. The new run's own
        averages start with the same values. Integers, such as seeds, are not copied.
        """
        values, metadata = self.workers.broadcast_from_chief(
            lambda: read_checkpoint(find_checkpoint(source))
        )
        prefix = "ema." if any(name.startswith("ema.") for name in values) else "model."
        fitting = 0
        new = []
        for name, variable in self.variables.items():
            owner, _, path = name.partition(".")
            if owner in ("model", "ema", "lookahead") and variable.dtype.is_floating:
                value = values.get(prefix + path)
                if value is not None and value.shape == tuple(variable.shape):
                    variable.assign(value)
                    fitting += 1
                elif owner == "model":
                    new.append(path)
        if not fitting:
            raise UsageError(
                f"init_from={source} has no weight of this model; its model is "
                f"{metadata['recipe']['model']}"
            )
        finish_restoring(self.state.model)
        started = {name: value for name, value in values.items() if name.startswith(prefix)}
        self.lineage = [f"from step 0: weights with the SHA-256 {weights_sha256(started)[:16]}"]
        weights = "averaged weights" if prefix == "ema." else "weights"
        also = f"; no match there, so new: {listed(new)}" if new else ""
        self.log(f"starting with the {weights} of {source} at step {metadata['step']}{also}")

    # A step

    def start_step(self, step: int, batch: Batch) -> list[FinishedStep]:
        """Start the update that makes `step` into `step + 1`; return the steps whose metrics have
        arrived.

        Usually the metrics of a step arrive with the next call. They arrive at once where they are
        needed, as for a summary, and after a compilation.
        """
        inputs = self.make_input(step, batch)
        if self.runner.is_traced(inputs):
            finished = self.run_traced(inputs)
        else:
            finished = self.trace_and_run(inputs)
        self.evaluations = []  # those were of the step before
        return finished

    def run_traced(self, inputs: StepInput) -> list[FinishedStep]:
        """Start a step of a traced image size, and wait for it only if its metrics are needed."""
        with self.timer.phase("train"):
            finished = self.start(inputs)
            self.timer.note_idle(finished[-1].end if finished else None)
            if self.is_awaited(inputs.step + 1):
                finished += self.runner.finish()
        self.timer.end_step(self.config.batch_size * len(finished))
        return finished

    def trace_and_run(self, inputs: StepInput) -> list[FinishedStep]:
        """Trace a step of a new image size, and wait for it."""
        with self.timer.phase("compile"):
            self.trace(inputs)
            finished = self.start(inputs)
            finished += self.runner.finish()
        self.timer.end_compilation()
        return finished

    def start(self, inputs: StepInput) -> list[FinishedStep]:
        """Start a traced step; return the one before it, or [] if that has been returned."""
        is_summarized = self.logger.is_summary_step(inputs.step + 1)
        return self.runner.start(inputs, keep_gradients=is_summarized)

    def make_input(self, step: int, batch: Batch) -> StepInput:
        """Return what the step needs that follows after `step` steps."""
        rates = self.state.optimizer.learning_rates(step)
        signal = self.signals.received if self.workers.size > 1 else None
        return StepInput(step, batch, rates, self.image_size_at(step), signal)

    def trace(self, inputs: StepInput) -> None:
        """Trace a step, and show the first one as a graph."""
        is_first = not self.runner.traced
        self.logger.progress.activity("compiling the step")
        function = self.runner.trace(inputs)
        if is_first:
            self.logger.log_graph(function)

    def is_awaited(self, step: int) -> bool:
        """Return whether the metrics of this step are needed before the next one starts.

        Each step's are on a cluster, as they hold the signals of all workers.
        """
        is_shown = self.logger.is_summary_step(step) or self.ends_epoch(step)
        is_kept = self.evaluator.is_due(step) or self.should_save(step)
        is_bound = self.logger.is_profile_bound(step)
        return is_shown or is_kept or is_bound or self.workers.size > 1

    def ends_epoch(self, step: int) -> bool:
        """Return whether an epoch, or the run, ends with this step."""
        return step % self.length.steps_per_epoch == 0 or step == self.length.last

    def should_save(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, on worker 0."""
        is_due = self.directory.should_save(step, self.evaluator.is_due(step))
        return self.workers.is_chief and is_due

    def can_be_saved(self, step: int) -> bool:
        """Return whether the metrics of this step have arrived and it was not skipped. The last
        step is saved after the loop.

        The metrics have not arrived if a save has become due by the clock since the step started.
        Then the next step is saved.
        """
        is_good = self.runner.is_up_to_date and not self.health.skipped_in_a_row
        return is_good and step < self.length.last

    # After a step

    def check_and_log(self, finished: Sequence[FinishedStep]) -> None:
        """Check and log the steps whose metrics have arrived."""
        self.unlogged += finished
        while self.unlogged:
            oldest = self.unlogged.pop(0)  # first, so that `save_after` does not count it again
            skipped = self.health.record(oldest)
            if skipped and not self.health.has_diverged:
                self.log(skipped)

            is_summarized = self.logger.is_summary_step(oldest.step)
            diagnostics = self.diagnose(oldest) if is_summarized else None
            with self.timer.phase("report"):
                record = self.logger.log_step(oldest, diagnostics, self.health.skipped_steps)
                if self.health.has_diverged:
                    left = self.workers.broadcast_from_chief(self.directory.describe_divergence)
                    raise DivergedError(f"{skipped}; {left}")
                if record:
                    self.callbacks.step(oldest.step, record)

    def diagnose(self, finished: FinishedStep) -> StepDiagnostics:
        """Return the diagnostics of a step, with the gradient norms and cosines of all workers'
        towers.
        """
        with self.timer.phase("report" if self.diagnoser.is_compiled else "compile"):
            diagnostics = self.diagnoser.diagnose(finished)
            of_worker = (diagnostics.tower_gradient_norm, diagnostics.tower_gradient_cosine)
            norms, cosines = zip(*self.workers.gather(of_worker), strict=True)
        return diagnostics._replace(
            tower_gradient_norm=np.concatenate(norms), tower_gradient_cosine=np.concatenate(cosines)
        )

    def note_target(self, step: int) -> None:
        """Set `reached` once the accuracy on the first split, without test-time augmentation, meets
        the target.
        """
        target = self.config.target_accuracy
        if self.reached or not target or not self.evaluations:
            return

        score = self.evaluations[0]  # of the first split, without TTA
        if score["accuracy"] < target:
            return

        self.reached = score["accuracy"]
        self.log(
            f"reached {100 * self.reached:.2f} % on {score['split']} (target "
            f"{100 * target:.2f} %) at step {step}, after "
            f"{training_seconds(self.timer.seconds):.1f} s of training"
        )

    def note_signal(self, finished: Sequence[FinishedStep]) -> None:
        """Note a signal to stop: on a cluster, the one that the step exchanged."""
        if self.workers.size > 1:
            self.stop_signal = int(finished[-1].metrics.stop_signal)
        else:
            self.stop_signal = self.signals.received

    # Evaluating and saving

    def evaluate_now(self, step: int, final: bool = False) -> None:
        """Score the validation split if there is one, else test; both if `final`. Log the
        scores.
        """
        with self.timer.phase("evaluate"):
            evaluations = self.evaluator.run(final)
            self.evaluations = self.logger.log_evaluation(
                step, evaluations, self.evaluator.splits, final
            )
            for record in self.evaluations:
                self.callbacks.evaluation(step, record)

    def values(self) -> dict[str, np.ndarray]:
        """Return the values of all variables by name."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def save_now(self, step: int, wait: bool = False) -> bool:
        """Save the state after `step`; return whether it is saved. With `wait`, all workers wait
        for worker 0.
        """
        if wait:
            return self.workers.broadcast_from_chief(lambda: self._save(step))
        if not self.workers.is_chief:
            return True
        return self._save(step)

    def _save(self, step: int) -> bool:
        dataset = self.setup.dataset
        metadata = {
            "recipe": recipe_fields(self.config),
            "facts": self.experiment | self.platform,
            "lineage": self.lineage,
            "dataset": dataset.name,
            "dataset_info": dataset.info._asdict(),
            **{f"{name}_sha256": digest for name, digest in dataset.digests().items()},
            "steps_per_epoch": self.length.steps_per_epoch,
            "evaluations": self.evaluations,
            "failed_saves": self.directory.failed_saves,
            **self.timer.metadata(),
            **self.health.metadata(),
            **self.logger.smoothed_losses.metadata(),
        }
        with self.timer.phase("save"):
            saved = self.directory.save(step, self.values(), metadata)
        if saved:
            self.logger.saved_step = step
        return saved

    def save_early(self, step: int) -> NoReturn:
        """Save the last step after a signal, and raise Interrupted."""
        self.logger.progress.pause()
        saved = self.save_now(step, wait=True)
        outcome = f"saved step {step}"
        if not saved:
            outcome = self.workers.broadcast_from_chief(self.directory.describe_latest)
        raise Interrupted(self.stop_signal, f"{outcome}: {HOW_TO_RESUME}")

    def save_after(self, error: BaseException, step: int) -> None:
        """Save the last finished step after an error, unless its variables may be half assigned.

        They may be after an error of a step, or of TensorFlow on a cluster, where a lost worker is
        one. Nothing is saved after a divergence either.
        """
        self.logger.progress.pause()
        worker_is_lost = self.workers.size > 1 and isinstance(error, tf.errors.OpError)
        if worker_is_lost or isinstance(error, DivergedError) or step == 0:
            return
        try:
            # raises the error of a step again, so that nothing is saved after it
            self.unlogged += self.runner.finish()
            for finished in self.unlogged:
                self.health.record(finished)
                self.logger.log_step(finished, None, self.health.skipped_steps)
            if self.save_now(step):
                self.log(f"stopped by an error; saved step {step}: {HOW_TO_RESUME}")
        except Exception as another:
            latest = self.directory.describe_latest()
            self.log(f"step {step} is not saved ({error_line(another)}); {latest}")
