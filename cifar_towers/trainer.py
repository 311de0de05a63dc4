"""One training run from top to bottom: set up, resume, train, finish."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from cifar_towers import devices
from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.checkpoint import first_nonfinite
from cifar_towers.checkpointing.manager import CheckpointManager
from cifar_towers.config import TrainConfig, parse_profile_steps
from cifar_towers.config.schedules import ImageSizeSchedule
from cifar_towers.config.train_config import shared_settings
from cifar_towers.data import sources
from cifar_towers.data.batches import Batch
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import (
    NOTHING_TO_SAVE,
    DivergedError,
    Interrupted,
    RunError,
    UsageError,
    command,
    count,
    error_text,
)
from cifar_towers.evaluation.evaluator import Evaluator, make_classify_fn, score_split
from cifar_towers.evaluation.score import describe_score, reported_score
from cifar_towers.models.layers import has_batch_norm
from cifar_towers.multi_worker import coordination
from cifar_towers.multi_worker.cluster_spec import ClusterSpec, Workers
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds
from cifar_towers.reporting.profiler import StepProfiler
from cifar_towers.reporting.run_logger import Callbacks, RunInfo, RunLogger
from cifar_towers.reporting.run_records import read_times
from cifar_towers.shutdown import ShutdownHandler
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import describe_out_of_memory, on_gpus
from cifar_towers.training import build, tuning
from cifar_towers.training.diagnostics import activation_layers
from cifar_towers.training.health import Health, locate_nonfinite
from cifar_towers.training.results import gather_diagnostics
from cifar_towers.training.state import TrainState
from cifar_towers.training.step_runner import FinishedStep, StepRunner, was_skipped


def train(
    config: TrainConfig,
    source: sources.Source,
    shutdown: ShutdownHandler,
    cluster: ClusterSpec | None = None,
    launch_id: str = "",
    callbacks: Sequence[Any] = (),
    make_handle: Callable[[Path], Any] = Path,
    timer: PhaseTimer | None = None,
    others: Sequence[TrainConfig] = (),
) -> dict:
    """Train, resume, or return the stored result of a finished run. On a cluster only worker 0 writes `train_dir`.

    Args:
      cluster: the workers to train with; None: this process alone.
      launch_id: id that all processes of one launch share; empty without a launcher. A process that the launcher
        restarts resumes, even with `overwrite`.
      callbacks: functions and objects that are called during the run; see `Callbacks`.
      make_handle: function from the run's directory to the object that callbacks get as `run`.
      timer: the timer that runs since the program started; default: a new one.
      others: configs of the command's other seeds; with `overwrite`, their directories are cleared with this one.

    Returns:
      The content of result.json. `reached` is the accuracy that met the target, or 0. `images_per_sec` is None if every
      step needed compilation.

    Raises:
      RunError: the last step could not be saved, or the run cannot be rolled back. Others: see `cifar_towers.errors`.
    """
    timer = timer or PhaseTimer()
    shutdown.exit_immediately_from_now(NOTHING_TO_SAVE)
    setup_devices = functools.partial(devices.setup_devices, config, cluster)
    with coordination.connect(cluster, setup_devices, config.worker_wait_seconds, shutdown) as (workers, hardware):
        source, dataset = build.load_data(config, source)
        if cluster:
            workers.assert_equal(shared_values(config, dataset, hardware.precision, len(hardware.local_towers)))
        again = "the same command" + " without --overwrite" * config.overwrite  # which would delete the run
        explained = explained_errors(config, hardware.towers)  # before `choose_directory` may drop `overwrite`
        config, *others = (workdir.choose_directory(each, source.banner, launch_id) for each in (config, *others))
        overwritten = [each.directory for each in others if each.overwrite]
        with coordination.worker_train_dir(workers, config.train_dir) as own, explained:
            config = dataclasses.replace(config, train_dir=own)
            with Callbacks(callbacks, make_handle(config.directory)).until_end() as told:
                set_up = functools.partial(Run, dataset, source.banner, hardware, shutdown, workers, timer, told, again)
                return train_run(config, set_up, launch_id, overwritten)


def shared_values(config: TrainConfig, dataset: Dataset, precision: str, num_towers: int) -> dict[str, Any]:
    """Return what must be equal on all workers of a cluster: settings, code, versions, data, precision and towers."""
    package = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    versions = {
        "the code of cifar_towers, as sha256,": hashlib.sha256(package).hexdigest(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
    }
    code = {f"a file of {setting}, as sha256,": digest for setting, digest in workdir.own_code(config).items()}
    data = {f"{name} images, as sha256,": getattr(dataset, name).digest for name in ("train", "validation", "test")}
    return shared_settings(config) | versions | code | data | {"precision": precision, "towers": num_towers}


def train_run(
    config: TrainConfig, set_up: Callable[..., "Run"], launch_id: str, overwritten: Sequence[Path] = ()
) -> dict:
    """Train a run to its end, and write its result.

    With `overwrite`, its directory and the `overwritten` ones of other runs are cleared first.

    With `micro_batches=auto`, a run whose step does not fit into memory is set up again with more micro-batches, and
    resumes.
    """
    micro_batches = 0  # until a step did not fit: as the config says
    with contextlib.ExitStack() as lock:
        while True:
            run = set_up(config, micro_batches=micro_batches)
            try:
                if not micro_batches:  # the first time; a restart holds the lock already
                    lock.enter_context(workdir.exclusive(config.directory))
                    workdir.check_is_own(config)
                step = run.resume()
                if config.overwrite:  # now that nothing is refused any more
                    with contextlib.ExitStack() as locks:
                        for other in overwritten:
                            locks.enter_context(workdir.exclusive(other))
                        for directory in (config.directory, *overwritten):
                            workdir.clear(directory, launch_id)
                    config = dataclasses.replace(config, overwrite=False)
                if result := run.stored_result(step):
                    return result
                run.begin(step)
                try:
                    step = train_with_rollbacks(step, run)
                except tf.errors.OpError as error:
                    micro_batches = run.choose_more_micro_batches(error)
                else:
                    return finish(step, run)
            finally:
                run.end()
            del run  # frees its variables, which `error` referred to until here
            keras.backend.clear_session()
            gc.collect()


def train_with_rollbacks(step: int, run: "Run") -> int:
    """Call `train_from`. After a divergence, go back to a checkpoint and repeat, with `rollback_on_divergence`."""
    while True:
        try:
            return train_from(step, run)
        except DivergedError as error:
            step = run.roll_back(error)


def train_from(step: int, run: "Run") -> int:
    """Train from `step` until the end, the target or a signal; return the number of finished steps.

    Raises:
      Interrupted: after a signal; the last finished step is saved, or the message says that it is not.
      DivergedError: too many steps in a row were skipped, or a variable is not finite at the end.
    """
    try:
        run.complete_evaluation(step)
        if not run.reached:
            for batch in run.batches.stream(step, run.length.last):
                finished = run.start_step(step, batch)
                step += 1
                for hook in run.hooks:
                    hook(step, finished)
                if run.reached:
                    break
                run.shutdown.check()
    except Interrupted as interrupt:
        raise run.save_on_interrupt(step) from interrupt
    if nonfinite := first_nonfinite(run.variables):
        raise DivergedError(f"{nonfinite} is not finite after step {step}")
    return step


def finish(step: int, run: "Run") -> dict:
    """Save the last step, evaluate every split, and write the result."""
    saved = run.save_now(step, wait=True)
    outcome = f"step {step} is saved; {run.again} evaluates it" if saved else run.checkpoints.describe_latest()
    run.shutdown.exit_immediately_from_now(outcome)
    run.logger.begin_final_evaluation(step, run.evaluator.splits)
    run.evaluate_now(step, final=True)
    run.note_target(step)
    weights_sha256 = run.state.weights_sha256()
    run.workers.assert_equal({"weights, as sha256,": weights_sha256})
    result = {
        "step": step,
        "reached": run.reached,
        "dataset": run.dataset.name,
        **run.timer.summary(),
        "weights_sha256": weights_sha256,
        "failed_saves": run.checkpoints.failed_saves,
        **run.health.summary(),
        "evaluations": run.evaluations,
    }
    run.logger.log_result(result)
    if not saved and not run.save_now(step):  # a last attempt: evaluation took a while
        raise RunError(f"step {step}, the last, could not be saved; make room, then {run.again} resumes")
    run.logger.write_result(result)
    return result


class Run:
    """One run in one directory: the parts that train it, and the hooks after each step.

    Attributes:
      requested: the config as it was given. config: the same after `tuning.resolve_choices`, which puts values in place
        of `auto` and of an empty variable placement.
      variables: every variable that checkpoints hold, by name.
      towers: the towers of the step; a single one if the devices hold stages of the model.
      local_towers: the devices of this process, each as a tower, also if they hold stages.
      hooks: functions of (number of finished steps, steps whose metrics have arrived), called after every step.
      image_size_at: function (step) -> height and width of its images in pixels.
      evaluations: records of the evaluations after the last step, if it was evaluated.
      reached: the first accuracy that met the target; 0 until then.
    """

    def __init__(
        self,
        dataset: Dataset,
        banner: str,
        hardware: devices.Devices,
        shutdown: ShutdownHandler,
        workers: Workers,
        timer: PhaseTimer,
        callbacks: Callbacks,
        again: str,
        requested: TrainConfig,
        micro_batches: int = 0,
    ):
        """Build batches, model, state, step and collaborators as the `requested` config asks for.

        Args:
          again: the command that resumes the run, as messages call it.
          micro_batches: number of micro-batches if the config says `auto`; 0: the number that the run had so far, or 1
            in a new run.

        Raises:
          UsageError: the settings do not fit this machine, model or data set.
        """
        strategy, towers, self.local_towers, precision = hardware
        self.requested, self.dataset, self.precision = requested, dataset, precision
        self.shutdown, self.workers, self.timer, self.callbacks, self.again = shutdown, workers, timer, callbacks, again

        rows = requested.examples_drawn * len(self.local_towers) // len(towers)
        self.batches = build.make_batches(requested, dataset.train, rows=(workers.index * rows, rows), towers=towers)
        self.length = length = requested.run_length(self.batches.steps_per_epoch)
        profiled = parse_profile_steps(requested.profile_steps)
        if profiled and profiled[0] >= length.last:
            raise UsageError(
                f"profile_steps={requested.profile_steps}: this run ends with step {length.last}; give earlier steps"
            )
        self.profiler = StepProfiler(requested.directory, *profiled) if profiled and workers.is_chief else None

        previous = workdir.previous_choices(requested, requested.num_towers(len(towers)))
        if micro_batches:
            previous["micro_batches"] = micro_batches
        config, chosen = tuning.resolve_choices(requested, towers, precision, dataset.train, length, previous)
        self.config = config
        self.state, train_step, self.towers = build.make_training(
            config, towers, precision, dataset.train, length, strategy, self.batches.load_images
        )
        self.variables = self.state.named_variables()
        self.augmentation = build.make_augmentation(config, dataset.info)  # without a function of the user's
        full_size = config.crop or config.image_size
        self.image_size_at = ImageSizeSchedule(config.image_size_schedule, full_size).at(length)
        if (size := self.image_size_at(length.total - 1)) != full_size:
            raise UsageError(
                f"image_size_schedule={config.image_size_schedule} is still at {size} pixels in the last of "
                f"{length.total} steps, and the net is evaluated on {full_size}; give places as 60%=32"
            )
        names = [*self.state.loss_averages.sums, *(f"the gradient of {name}" for name in self.state.weight_names)]
        self.step_runner = StepRunner(
            train_step, self.state.optimizer, self.image_size_at, config.verify_every_steps, self.towers, names, again
        )

        self._make_hooks(banner, chosen)
        self.evaluations: list[dict] = []
        self.reached = 0.0
        self._compiled = False  # whether the last step was compiled

    def _make_hooks(self, banner: str, chosen: Sequence[str]) -> None:
        """List the hooks, and build what they use: logger, evaluator, checkpoint manager and health check."""
        config, dataset, workers, length = self.config, self.dataset, self.workers, self.length
        info = RunInfo(
            config=config,
            chosen=chosen,
            dataset=dataset,
            banner=banner,
            local_towers=self.local_towers,
            towers=self.towers,
            shard_sizes=tuning.shard_sizes(config, len(self.towers)),
            precision=self.precision,
            length=length,
            model=self.state.model,
            variables=self.variables,
            activation_layers=[layer.name for layer in activation_layers(self.state.model)],
        )
        self.logger = RunLogger(info, self.timer, self.callbacks, quiet=not workers.is_chief)
        self.log = self.logger.log
        show = functools.partial(self.logger.progress.activity, "evaluating")
        classify = make_classify_fn(self.state.model, self.local_towers, self.augmentation, workers, show)
        self.evaluator = Evaluator(
            functools.partial(score_split, classify),
            {"validation": dataset.validation, "test": dataset.test},
            self.state.evaluation_weights(),
            config.evaluate_every_steps(length),
            length.last,
            config.tta,
        )
        self.checkpoints = CheckpointManager(
            config.directory, self.variables, config.checkpoint_every_steps, config.keep_checkpoints, self.log, workers
        )
        self.health = Health(config.max_nonfinite_steps, self.state, self.towers, self._locate_nonfinite, self.log)
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self.metadata = workdir.run_metadata(self.requested, config, dataset, self.precision, len(self.towers), threads)
        self._has_batch_norm = has_batch_norm(self.state.model)
        self.hooks: list[Callable[[int, Sequence[FinishedStep]], None]] = [
            self.check_and_log,
            self.evaluate_if_due,
            self.log_epoch_if_due,
            self.save_if_due,
            self.note_target,
            self.stop_after_callback_error,
        ]

    # The start and the end of a run

    def resume(self) -> int:
        """Log what will be trained, and restore the newest checkpoint or start with `init_from`; return the step."""
        self.logger.log_start()
        check = functools.partial(workdir.check_resumable, self.requested, self.dataset, self._has_batch_norm)
        metadata = self.checkpoints.restore_latest(check, self.config.overwrite)
        # with `overwrite` the file belongs to the deleted run; after a restart in this process the timer is newer
        ignores_file = self.config.overwrite or self.timer.seconds
        last = {} if ignores_file else read_times(self.config.directory)
        self.timer.resume(metadata or {}, last or self.timer.metadata())
        if not metadata:
            if source := self.config.init_from:
                self.log(self.checkpoints.initialize(Path(source), self.state.head_names(), self.metadata))
            return 0
        self.health.restore(metadata)
        self.evaluations = metadata["evaluations"]
        towers = count(metadata["towers"], "tower")
        self.log(f"resuming from step {metadata['step']}, saved with {towers} in {metadata['precision']}")
        changes = (
            workdir.describe_changes(metadata, self.metadata, self._has_batch_norm),
            workdir.describe_changed_threads(metadata, self.metadata),
            workdir.describe_changed_code(metadata, self.metadata),
        )
        for line in filter(None, changes):
            self.log(line)
        return metadata["step"]

    def stored_result(self, step: int) -> dict | None:
        """Return the result of a run that is complete at `step`; otherwise None."""
        stored = functools.partial(workdir.completed_result, self.config, step, self.length.last)
        if result := self.workers.broadcast_from_chief(stored):
            score = describe_score(reported_score(result["evaluations"]) or {})
            tta, run = self.config.tta, f"--train_dir={self.config.directory}"
            missing = tta and all(each["tta"] != tta for each in result["evaluations"])
            advice = f"; for TTA {tta}: {command('evaluate.py', run, f'--tta={tta}')}" if missing else ""
            self.log(f"{self.config.directory} is complete at step {step}: {score}{advice}")
        return result

    def begin(self, step: int) -> None:
        """Open the files of the run. From now on, a signal ends the run once its current step is saved."""
        self.workers.cluster.log(f"trains from step {step} to {self.length.last}")
        self.logger.open(step, self.image_size_at, self.evaluator.images_left)
        if self.callbacks.error:
            raise self.callbacks.error
        self.shutdown.announce = self.log
        self.shutdown.check()
        self.shutdown.defer_signals(by_consensus=self.workers.size > 1)
        self.timer.end_phase("start")
        self.logger.write_times()
        if self.profiler and step >= self.profiler.last:
            self.log(f"profile_steps={self.config.profile_steps}: no new trace, as the run goes on from step {step}")
        if step == 0 and (self.config.rollback_on_divergence or self.config.init_from):
            self.save_now(0)  # a checkpoint to roll back to; a run that resumes from it does not read `init_from`

    def end(self) -> None:
        """End the progress display, and a profile that is being taken."""
        self._profile(StepProfiler.close)
        self.logger.progress.pause()

    # A step

    def start_step(self, step: int, batch: Batch) -> list[FinishedStep]:
        """Start the update that makes `step` into `step + 1`; return the steps whose metrics have arrived.

        Usually the metrics of a step arrive with the next call. They arrive at once if the step is verified or may not
        fit into memory, with a profile, on a cluster, or before an evaluation, a checkpoint or the end of an epoch.
        """
        if not on_gpus(self.local_towers) and self.step_runner.skipped_last():
            # find the non-finite tensor before the next update; on GPUs, asking at every step would stall the device
            self.check_and_log(step, self.step_runner.finish())
        self._compiled = needs_compilation = self.step_runner.needs_compilation(step)
        self.timer.end_phase("compile" if needs_compilation else "input")
        is_cluster = self.workers.size > 1
        options: dict[str, Any] = {
            "rate_factor": self.health.rate_factor,
            "collect_diagnostics": self.logger.is_summary_step(step + 1),
            "stop_signal": self.shutdown.received_signal if is_cluster else None,
        }
        may_not_fit = needs_compilation and not self.requested.micro_batches
        if may_not_fit and step:
            self.check_and_log(step, self.step_runner.finish())
            self.save_now(step)  # to resume from, with more micro-batches
        if needs_compilation:
            self._compile(step, batch, options)
        self._profile(StepProfiler.before, step)
        finished = self.step_runner.start(step, batch, **options)
        if is_cluster or self.profiler or may_not_fit or self._is_something_due(step + 1):
            finished += self.step_runner.finish()
        self._profile(StepProfiler.after, step + 1)
        self.logger.end_step(step + 1, not needs_compilation)
        self.evaluations = []
        return finished

    def _compile(self, step: int, batch: Batch, options: dict[str, Any]) -> None:
        """Trace and compile a step of a new kind; draw the graph of the first."""
        self.logger.progress.activity(f"compiling the step for images of {self.image_size_at(step)} pixels")
        with self.shutdown.interruptible():  # it takes a while, and nothing has changed yet
            function = self.step_runner.trace(step, batch, **options)
        if not self.step_runner.traced:
            self.logger.log_graph(function)

    def _is_something_due(self, step: int) -> bool:
        is_evaluated = self.evaluator.is_due(step)
        return is_evaluated or self._ends_epoch(step) or self.checkpoints.should_save(step, is_evaluated)

    def _ends_epoch(self, step: int) -> bool:
        return step % self.length.steps_per_epoch == 0 or step == self.length.last

    def _profile(self, action: Callable[..., str | None], *step: int) -> None:
        """Let the profiler, if there is one, begin or end its trace; log its message."""
        if self.profiler and (message := action(self.profiler, *step)):
            self.logger.progress.pause()
            self.log(message)
            self.timer.end_phase("profile")

    # What happens after a step

    def check_and_log(self, step: int, finished: Sequence[FinishedStep]) -> None:
        """Check and log the steps whose metrics have arrived; on a cluster, record the signal that workers agree on."""
        finished = list(finished)
        if any(was_skipped(each.metrics) for each in finished):
            finished += self.step_runner.finish()  # has a later step changed the variables?
        for index, each in enumerate(finished):
            if self.workers.size > 1:
                self.shutdown.set_agreed_signal(int(each.metrics.stop_signal))
                each = each._replace(metrics=gather_diagnostics(self.workers, each.metrics))
            self.health.check(each, finished[index + 1 :])
            self.logger.log_step(each.step, each.metrics, each.learning_rates, each.image_size, self.health.summary())
        self.timer.end_phase("compile" if self._compiled else "report")

    def evaluate_if_due(self, step: int, finished: Sequence[FinishedStep]) -> None:
        """Evaluate the run if it is time to."""
        if self.evaluator.is_due(step):
            self.evaluate_now(step)

    def log_epoch_if_due(self, step: int, finished: Sequence[FinishedStep]) -> None:
        """Log the epoch that ends with this step, if one does."""
        if self._ends_epoch(step):
            self.logger.log_epoch(step, finished[-1].learning_rates, self.evaluations)

    def save_if_due(self, step: int, finished: Sequence[FinishedStep]) -> None:
        """Save a checkpoint if one is due, the metrics of `step` have arrived, and the step was not skipped.

        `finish` saves the last step.
        """
        is_good = step < self.length.last and self.step_runner.is_up_to_date and not self.health.in_a_row
        if is_good and self.checkpoints.should_save(step, self.evaluator.is_due(step)):
            self.save_now(step)

    def note_target(self, step: int, finished: Sequence[FinishedStep] = ()) -> None:
        """Set `reached` once the reported weights meet the target on the first split without test-time augmentation."""
        plain = [s for s in self.evaluations if not s["tta"] and s["split"] == self.evaluations[0]["split"]]
        score, target = reported_score(plain), self.config.target_accuracy
        if target and not self.reached and score and score["accuracy"] >= target:
            self.reached = score["accuracy"]
            self.log(
                f"reached {100 * self.reached:.2f} % on {score['split']} (target {100 * target:.2f} %) at step "
                f"{step}, after {training_seconds(self.timer.seconds):.1f} s of training"
            )

    # Evaluating, saving, going back

    def complete_evaluation(self, step: int) -> None:
        """Evaluate the run after `step` if an earlier process was stopped in that evaluation; then note the target."""
        if self.evaluator.is_due(step) and not self.evaluations:
            self.logger.drop_evaluations(step)
            self.evaluate_now(step)
        self.note_target(step)

    def evaluate_now(self, step: int, final: bool = False) -> None:
        """Score the validation split if there is one, else test; both if `final`. Log the scores."""
        with self.shutdown.interruptible():
            evaluations = self.evaluator.run(final)
        self.evaluations = self.logger.log_evaluation(step, evaluations, self.evaluator.splits, final)
        self.timer.end_phase("evaluate")
        self.logger.write_times()

    def save_now(self, step: int, wait: bool = False) -> bool:
        """Save the state after `step`; return whether it is saved. With `wait`, all workers wait for that."""
        metadata = self.metadata | {
            "accuracy": self.evaluations[-1]["accuracy"] if self.evaluations else None,
            "evaluations": list(self.evaluations),
            "last_step": self.length.last,
            **self.timer.metadata(),
            **self.health.metadata(),
        }
        saved = self.checkpoints.save(step, metadata, wait)
        self.timer.end_phase("save")
        if saved:
            self.logger.log_save(step)
        return saved

    def save_on_interrupt(self, step: int) -> Interrupted:
        """Save the last finished step, if there is one; return the error to raise."""
        self.shutdown.defer_signals()
        self.check_and_log(step, self.step_runner.finish())
        self.logger.progress.pause()
        if not step:
            return Interrupted(self.shutdown.signal, NOTHING_TO_SAVE)
        saved = self.save_now(step, wait=True)
        outcome = f"saved step {step}" if saved else self.checkpoints.describe_latest()
        self.stop_after_callback_error(step)
        return Interrupted(self.shutdown.signal, f"{outcome}: {self.again} resumes")

    def stop_after_callback_error(self, step: int, finished: Sequence[FinishedStep] = ()) -> None:
        """If a callback has raised an exception, save the last finished step and raise that exception."""
        if self.callbacks.error:
            self.check_and_log(step, self.step_runner.finish())
            self.logger.progress.pause()
            if self.save_now(step):
                self.log(f"a callback failed; saved step {step}: {self.again} resumes")
            raise self.callbacks.error

    def roll_back(self, error: DivergedError) -> int:
        """Restore the last checkpoint that the non-finite steps have not changed, or an earlier one; return its step.

        Raises:
          DivergedError: rollbacks are off, there were too many, or there is no checkpoint.
        """
        advice = "a smaller --learning_rate (and others)"
        advice += " or --precision=float32" if self.precision.endswith("16") else ""
        if not self.config.rollback_on_divergence:
            raise DivergedError(
                f"{error}; {self.checkpoints.describe_latest()}: give --rollback_on_divergence to go back to the "
                f"last good checkpoint at half the rates, or --overwrite with {advice}"
            ) from error
        self.step_runner.discard()
        self.health.roll_back(error, advice)
        metadata = self.checkpoints.roll_back(self.health.last_good_step, **self.health.summary())
        if metadata is None:
            reason = f"{error}; there is no checkpoint to go back to"
            raise DivergedError(f"{reason}: start again with --overwrite and {advice}") from error
        step, self.evaluations, self.reached = metadata["step"], metadata["evaluations"], 0.0
        self.timer.resume(metadata, self.timer.metadata())
        self.logger.truncate_after(step)
        rates = f"learning rates are {self.health.rate_factor:g} of the recipe's"
        self.log(f"{error}\nrolled back to step {step}; {rates}")
        self.timer.end_phase("save")
        return step

    def choose_more_micro_batches(self, error: tf.errors.OpError) -> int:
        """Return and log the number of micro-batches to resume with after a step did not fit into the memory.

        Raises:
          OpError: `error` itself, if it is not about memory, if `micro_batches` is not `auto`, or if no larger number
            divides the towers' shares.
        """
        reason = "" if self.requested.micro_batches else describe_out_of_memory(error)
        number = tuning.more_micro_batches(self.config, len(self.towers)) if reason else 0
        if not number:
            raise error
        line = f"a step does not fit into the memory ({reason}): continuing with --micro_batches={number}"
        if self._has_batch_norm:
            largest = max(tuning.shard_sizes(self.config, len(self.towers)))
            now, then = largest // self.config.micro_batches, largest // number
            line += f"; batch norm now sees {then} images at a time instead of {now}, which changes what is trained; "
            line += f"to keep it the same for the whole run, give --overwrite --micro_batches={number}"
        self.log(line)
        return number

    def _locate_nonfinite(self, state: TrainState, tower: Tower, batch: Batch, image_size: int) -> str:
        """Repeat the forward pass of a tower; return the same answer on all workers. See `locate_nonfinite`."""
        message, local_towers = "", [each for each in self.towers if each in self.local_towers]
        if tower in local_towers:
            sizes = tuning.shard_sizes(self.config, len(local_towers), len(batch.labels))
            shard = split_batch(batch, local_towers, sizes=sizes)[local_towers.index(tower)]
            shard, parts = self.batches.load_images(shard, tower.device), self.config.micro_batches
            message = locate_nonfinite(state.model, self.augmentation, tower, shard, image_size, parts)
        return next(filter(None, self.workers.gather(message)), "")


@contextlib.contextmanager
def explained_errors(config: TrainConfig, towers: Sequence[Tower]) -> Iterator[None]:
    """Raise TensorFlow's errors about the limits of a device as UsageErrors, with the flags to give instead.

    Raises:
      UsageError: a device's memory is too small, or an operation has no deterministic form. Other errors: those from
        inside.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if reason := describe_out_of_memory(error):
            advice = "a smaller --batch_size, which is another run, may fit"
            without = " without --overwrite" * config.overwrite
            if more := tuning.suggest_more_micro_batches(config, len(towers)):
                advice = f"the same command with {more} takes each share in smaller parts, and{without} resumes from "
                advice += "the last checkpoint if the net has no batch normalization"
            raise UsageError(f"{reason}: the memory is too small for this; {advice}") from error
        if not (config.deterministic and isinstance(error, tf.errors.UnimplementedError)):
            raise
        raise UsageError(f"{error_text(error)}: train without --deterministic, or without that operation") from error
