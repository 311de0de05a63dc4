"""One training run from top to bottom: build, resume, train, finish."""

import functools
from collections.abc import Callable, Sequence

from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.manager import CheckpointManager, SharedCheckpoints
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources
from cifar_towers.data.batches import Batch
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import NOTHING_TO_SAVE, DivergedError, Interrupted, RunError, Shutdown
from cifar_towers.evaluation.evaluator import Evaluator, make_evaluate_fn
from cifar_towers.evaluation.score import reported_score
from cifar_towers.evaluation.target import TargetAccuracy
from cifar_towers.models.layers import has_batch_norm
from cifar_towers.multi_worker import coordination
from cifar_towers.multi_worker.cluster_spec import ClusterSpec, Workers
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.profiler import StepProfiler
from cifar_towers.reporting.run_info import RunInfo, describe_score
from cifar_towers.reporting.run_logger import RunLogger
from cifar_towers.training import build, devices, memory
from cifar_towers.training.health import DivergenceState, HealthMonitor
from cifar_towers.training.results import gather_diagnostics
from cifar_towers.training.run_setup import RunSetup, setup_run
from cifar_towers.training.step_runner import FinishedStep, StepInputs
from cifar_towers.training.tower_count import advise_fewer_towers


def train(
    config: TrainConfig,
    source: sources.Source,
    shutdown: Shutdown,
    cluster: ClusterSpec | None = None,
    launch_id: str = "",
) -> dict:
    """Trains, resumes, or returns the stored result of a finished run. On a cluster only worker 0 writes `train_dir`.

    Args:
      shutdown: tells of signals.
      cluster: the workers to train with; None: this process alone.
      launch_id: of the launcher that started this process, if any; what that starts again resumes with `overwrite`.

    Returns:
      The content of result.json, where `reached` is the accuracy that met the target, or 0; and `images_per_sec` is
      None if every step compiled.

    Raises:
      RunError: the last step could not be saved, or the run cannot be rolled back. Others: see `cifar_towers.errors`.
    """
    timer = PhaseTimer()
    shutdown.exit_immediately_from_now(NOTHING_TO_SAVE)
    make_devices = functools.partial(devices.setup_devices, config, cluster)
    with coordination.connect(cluster, make_devices, config.worker_wait_seconds, shutdown) as (workers, hardware):
        source, dataset = build.load_data(config, source)
        precision = devices.choose_precision(config.precision, hardware.local_towers)
        coordination.assert_workers_agree(workers, config, dataset, precision, len(hardware.local_towers))
        config = workdir.choose_directory(config, source.banner, launch_id)
        with (
            coordination.worker_train_dir(workers, config) as config,
            devices.explained_errors(config, hardware.towers),
        ):

            def attempt(config: TrainConfig, chosen: dict) -> dict:
                previous = workdir.previous_choices(config, len(hardware.towers)) | chosen
                setup = setup_run(config, dataset, precision, hardware, workers.index, previous)
                trainer = Trainer(setup, dataset, source.banner, shutdown, workers, timer)
                with workdir.exclusive(config.directory):
                    workdir.prepare(config, launch_id)
                    return trainer.run()

            return memory.retry_in_smaller_parts(attempt, config)


class Trainer:
    """One run in one directory: its collaborators, and the loop over them."""

    def __init__(
        self, setup: RunSetup, dataset: Dataset, banner: str, shutdown: Shutdown, workers: Workers, timer: PhaseTimer
    ):
        self.setup, self.step_runner, self.dataset = setup, setup.step_runner, dataset
        self.shutdown, self.workers, self.timer = shutdown, workers, timer
        self.config, self.state, self.length = config, state, length = setup.config, setup.state, setup.length
        run_info = RunInfo(dataset=dataset, banner=banner, **setup.description())
        self.logger = RunLogger(run_info, timer, quiet=not workers.is_chief)
        self.log = self.logger.log
        self.evaluator = Evaluator(
            make_evaluate_fn(state.model, setup.local_towers, setup.augmentation, workers, self.logger.show_evaluation),
            {"validation": dataset.validation, "test": dataset.test},
            state.evaluation_weights,
            config.evaluate_every_steps(length),
            length.last,
        )
        self.target = TargetAccuracy(config.target_accuracy, self.log)
        manager = CheckpointManager(
            config.directory, state, config.checkpoint_every_steps, config.keep_checkpoints, self.log
        )
        self.checkpoints = SharedCheckpoints(manager, workers, state.named_variables())
        self.divergence = DivergenceState(config.max_nonfinite_steps)
        self.health = HealthMonitor(self.divergence, setup, workers.gather, self.log)
        profiled_steps = setup.profiled_steps if workers.is_chief else None
        self.profiler = StepProfiler(config.directory, *profiled_steps) if profiled_steps else None
        self.metadata = workdir.run_metadata(setup.requested, config, dataset, setup.precision, len(setup.towers))

    def run(self) -> dict:
        """Resumes, trains, evaluates and writes the result; or returns the result of a finished run."""
        self.logger.log_start()
        step, evaluations = self._resume()
        finished = functools.partial(workdir.completed_result, self.config, step, self.length.last)
        if result := self.workers.broadcast_from_chief(finished):
            score = describe_score(reported_score(result["evaluations"]))
            self.log(f"{self.config.directory} is complete at step {step}: {score}")
            return result
        self.logger.open(step, functools.partial(self.evaluator.passes_left, tta=self.config.tta))
        self.shutdown.announce = self.log
        self.shutdown.check()
        self.shutdown.defer_signals(by_consensus=self.workers.size > 1)
        try:
            self.timer.end_phase("start")
            if self.config.rollback_on_divergence and step == 0:
                self._save(0)
            return self._finish(self._train(step, evaluations))
        finally:
            self._profile(StepProfiler.close)
            self.logger.progress.pause()

    def _train(self, step: int, evaluations: list[dict]) -> int:
        """Trains until the end, the target or a signal, across rollbacks; returns the number of updates done."""
        with memory.smaller_parts_for_memory(self.setup, self.log):
            while True:
                try:
                    return self._train_from(step, evaluations)
                except DivergedError as error:
                    step, evaluations = self._roll_back(error)

    def _train_from(self, first_step: int, evaluations: list[dict]) -> int:
        """The loop. `evaluations` are those made after `first_step`, if any."""
        step = first_step
        try:
            if self.evaluator.is_due(step) and not evaluations:
                self.logger.drop_evaluations(step)  # of an attempt that was interrupted before it could save
                evaluations = self._evaluate(step)
            if self.target.is_reached(step, evaluations, self.timer.training_seconds):
                return step
            for batch in self.setup.batches.stream(first_step, self.length.last):
                inputs = self.step_runner.inputs(step, self.divergence.rate_factor)
                self._start_step(step, batch, inputs, evaluations)
                step, evaluations = step + 1, []
                is_evaluated = self.evaluator.is_due(step)
                ends_epoch = step % self.length.steps_per_epoch == 0 or step == self.length.last
                if is_evaluated or ends_epoch or self.checkpoints.should_save(step, is_evaluated):
                    self._report(self.step_runner.finish())
                if is_evaluated:
                    evaluations = self._evaluate(step)
                if ends_epoch:
                    self.logger.log_epoch(step, inputs.learning_rates, evaluations)
                    self._advise(step)
                is_good = step < self.length.last and not (self.step_runner.steps_ahead or self.divergence.in_a_row)
                if is_good and self.checkpoints.should_save(step, is_evaluated):
                    self._save(step, evaluations)
                if self.target.is_reached(step, evaluations, self.timer.training_seconds):
                    break
                self.shutdown.check()
        except Interrupted as interrupt:
            raise self._save_on_interrupt(step, evaluations) from interrupt
        if nonfinite := self.state.first_nonfinite_variable():
            raise DivergedError(f"{nonfinite} is not finite after step {step}")
        return step

    def _start_step(self, step: int, batch: Batch, inputs: StepInputs, evaluations: Sequence[dict]) -> None:
        """Starts an update and reports the one before. An update of a new kind is compiled, which is timed apart."""
        compiled = self.step_runner.is_traced(inputs)
        self.timer.end_phase("input" if compiled else "compile")
        stop_signal = self.shutdown.received_signal if self.workers.size > 1 else None
        options = {"collect_diagnostics": self.logger.wants_diagnostics(step + 1), "stop_signal": stop_signal}
        may_not_fit = not compiled and not self.setup.requested.micro_batches
        if may_not_fit and step:
            self._report(self.step_runner.finish())
            self._save(step, evaluations)  # to continue from, in smaller parts
        if not compiled:
            self.logger.progress.activity(f"compiling the step for images of {inputs.image_size} pixels")
            with self.shutdown.interruptible():  # it takes a while, and nothing has changed yet
                function = self.step_runner.trace(batch, inputs, **options)
            if not self.step_runner.traced:
                self.logger.log_graph(function)
        self._profile(StepProfiler.before, step)
        finished = self.step_runner.start(step, batch, inputs, **options)
        if self.workers.size > 1 or self.profiler or may_not_fit:
            finished += self.step_runner.finish()
        self._profile(StepProfiler.after, step + 1)
        self.logger.end_step(step + 1, compiled)
        self._report(finished)
        self.timer.end_phase("report" if compiled else "compile")

    def _report(self, finished: Sequence[FinishedStep]) -> None:
        """Checks and logs steps whose metrics have been read."""
        for step, batch, inputs, metrics in finished:
            if self.workers.size > 1:
                self.shutdown.set_agreed_signal(int(metrics.stop_signal))
                metrics = gather_diagnostics(self.workers, metrics)
            self.health(step, metrics, batch, inputs.image_size)
            self.logger.log_step(step, metrics, inputs.learning_rates, inputs.image_size, self.divergence)

    def _advise(self, step: int) -> None:
        """After the first epoch, says if fewer towers would be faster."""
        if step == self.length.steps_per_epoch and self.logger.can_spare(2 * self.timer.seconds["compile"]):
            with self.shutdown.interruptible():
                advise_fewer_towers(self.setup, self.dataset.train, self.log)
            self.timer.end_phase("start")

    def _profile(self, action: Callable, *step: int) -> None:
        """Lets the profiler, if there is one, begin or end its trace; logs its message."""
        if self.profiler and (message := action(self.profiler, *step)):
            self.logger.progress.pause()
            self.log(message)
            self.timer.end_phase("profile")

    def _evaluate(self, step: int, tta: int = 0, final: bool = False) -> list[dict]:
        """Scores validation where it exists, else test; both if `final`. Records and returns the scores."""
        with self.shutdown.interruptible():
            scores = self.evaluator.run(tta, final)
        records = self.logger.log_evaluation(step, scores, self.evaluator.splits, final)
        self.timer.end_phase("evaluate")
        return records

    def _save(self, step: int, evaluations: Sequence[dict] = (), wait: bool = False) -> bool:
        """Saves the state after `step`, and returns whether it is saved. With `wait`, all workers wait for that."""
        metadata = self.metadata | {
            "accuracy": evaluations[-1]["accuracy"] if evaluations else None,
            "evaluations": list(evaluations),
            **self.timer.metadata(),
            **self.divergence.metadata(),
        }
        saved = (self.checkpoints.save_for_all if wait else self.checkpoints.save)(step, metadata)
        self.timer.end_phase("save")
        if saved:
            self.logger.log_save(step)
        return saved

    def _save_on_interrupt(self, step: int, evaluations: list[dict]) -> Interrupted:
        """Saves the last finished step, if there is one; returns the error to raise."""
        self.shutdown.defer_signals()
        self._report(self.step_runner.finish())
        self.logger.progress.pause()
        if not step:
            return Interrupted(self.shutdown.signal, NOTHING_TO_SAVE)
        saved = self._save(step, evaluations, wait=True)
        outcome = f"saved step {step}" if saved else self.checkpoints.describe_latest()
        return Interrupted(self.shutdown.signal, f"{outcome}: the same command resumes")

    def _roll_back(self, error: DivergedError) -> tuple[int, list[dict]]:
        """Restores the last checkpoint before the non-finite steps; returns its step and its evaluations.

        Raises:
          DivergedError: rollbacks are off, there were too many, or there is no checkpoint.
        """
        if not self.config.rollback_on_divergence:
            raise self.divergence.without_rollback(error, self.checkpoints.describe_latest()) from error
        last_good_step = int(self.state.step.numpy()) - self.step_runner.discard() - self.divergence.in_a_row
        self.divergence.roll_back(error)
        metadata = self.checkpoints.roll_back(last_good_step, self.divergence.rollbacks)
        if metadata is None:
            raise error
        self.target.reached = 0.0
        step = metadata["step"]
        self.logger.truncate_after(step)
        rates = f"learning rates are {self.divergence.rate_factor:g} of the recipe's"
        self.log(f"{error}\nrolled back to step {step}; {rates}")
        return step, metadata.get("evaluations", [])

    def _resume(self) -> tuple[int, list[dict]]:
        """Restores the newest checkpoint, if there is one; returns its step and the evaluations made after it."""
        find = functools.partial(
            workdir.checkpoint_to_resume, self.setup.requested, self.dataset, has_batch_norm(self.state.model)
        )
        metadata = self.checkpoints.restore_latest(find)
        if not metadata:
            return 0, []
        self.timer.resume(metadata["seconds"], metadata["images"])
        self.divergence.restore(metadata)
        towers = f"{metadata['towers']} tower{'s' * (metadata['towers'] > 1)}"
        self.log(f"resuming from step {metadata['step']}, saved with {towers} in {metadata['precision']}")
        return metadata["step"], metadata.get("evaluations", [])

    def _finish(self, step: int) -> dict:
        """Saves the last step, evaluates every split, and writes the result."""
        saved = self._save(step, wait=True)
        outcome = f"step {step} is saved; the same command evaluates it" if saved else "nothing was saved"
        self.shutdown.exit_immediately_from_now(outcome)
        self.logger.begin_final_evaluation(step, self.evaluator.splits)
        evaluations = self._evaluate(step, self.config.tta, final=True)
        self.target.is_reached(step, evaluations, self.timer.training_seconds)
        weights_sha256 = self.state.weights_sha256()
        self.workers.assert_equal({"weights, as sha256,": weights_sha256})
        result = {
            "step": step,
            "reached": self.target.reached,
            "dataset": self.dataset.name,
            **self.timer.summary(),
            "weights_sha256": weights_sha256,
            "failed_saves": self.checkpoints.failed_saves,
            **self.divergence.summary(),
            "evaluations": evaluations,
        }
        self.logger.log_result(result)
        if not saved and not self._save(step):  # a last attempt: evaluation took a while
            raise RunError(f"step {step}, the last, could not be saved; make room, then the same command resumes")
        self.logger.write_result(result)
        return result
