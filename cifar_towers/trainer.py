"""The training run: from a config to a trained model, its records and its checkpoints."""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.manager import CheckpointManager
from cifar_towers.config import TrainConfig, parse_profile_steps, schedules
from cifar_towers.data import sources
from cifar_towers.data.batches import Batch
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import NOTHING_TO_SAVE, DivergedError, Interrupted, RunError, UsageError, error_text
from cifar_towers.evaluation.evaluator import make_evaluator
from cifar_towers.files import atomic_io, run_files
from cifar_towers.multi_worker import agreement
from cifar_towers.multi_worker.coordination import Coordinator, single_worker
from cifar_towers.reporting import jsonl
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.profiler import StepProfiler
from cifar_towers.reporting.run_logger import RunLogger, is_due, told
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import HOST
from cifar_towers.training import auto_placement, build, devices
from cifar_towers.training.distributed_step import towers_here
from cifar_towers.training.health import DivergenceState, HealthMonitor
from cifar_towers.training.results import StepMetrics, to_numpy

if TYPE_CHECKING:
    from cifar_towers.cli.shutdown import ShutdownHandler


def train(
    config: TrainConfig,
    source: sources.Source,
    stop: "ShutdownHandler",
    team: Coordinator | None = None,
    launch_id: str = "",
) -> dict:
    """Trains, or goes on training, or finds that all is done; together with the other workers of a `team`, of whom the
    chief alone has a directory that stays.

    Returns:
      The content of result.json: `step`; `reached`, the accuracy that met the target, or 0; `dataset`; `seconds` by
      activity; `images_per_sec`; `weights_sha256`; how many `failed_saves`, `bad_steps` and `rollbacks` there were; and
      the records of the last `evaluations`.

    Raises:
      UsageError, DataError, DivergedError, Interrupted: see `cifar_towers.errors`.
      RunError: the last step could not be saved, or the run cannot go back to a checkpoint.
    """
    clock, team = PhaseTimer(), team or single_worker()
    stop.exit_immediately_from_now(NOTHING_TO_SAVE)
    if team.size > 1:
        strategy, towers = devices.setup_cluster(config, team.cluster.addresses, team.index)
    else:
        strategy, towers = None, devices.setup_towers(config)
    stop.reinstall_handlers()  # TensorFlow's server listens for SIGTERM itself
    config.tower_batch_size(len(towers))
    source, dataset = build.load_data(config, source)
    if source.banner and not config.train_dir:  # leaves the directory of the real run free for when there is CIFAR-10
        config = dataclasses.replace(config, train_dir=f"runs/{config.name}-synthetic-seed{config.seed}")
    if config.overwrite and workdir.was_cleared_by(config.directory, launch_id):
        config = dataclasses.replace(config, overwrite=False)  # what is there is of the start before this one
    with contextlib.ExitStack() as stack:
        if not team.is_chief:
            own = tempfile.TemporaryDirectory(prefix=f"cifar_towers-worker{team.index}-", ignore_cleanup_errors=True)
            config = dataclasses.replace(config, train_dir=stack.enter_context(own))
            team.before_exit = own.cleanup
        try:
            return Trainer(config, source, dataset, towers, stop, clock, team, strategy, launch_id).run()
        except tf.errors.ResourceExhaustedError as error:
            smaller = config.suggest_smaller_micro_batches(len(towers))
            advice = "a smaller --batch_size, which is another run, may fit"
            if smaller:
                advice = f"the same command with {smaller} takes each tower's share in smaller parts, and goes on from "
                advice += "the last checkpoint"
            raise UsageError(f"{error_text(error)}: the memory is too small for this; {advice}") from error
        except tf.errors.UnimplementedError as error:
            if not config.deterministic:
                raise
            raise UsageError(
                f"{error_text(error)}: train without --deterministic, or without what has no such form"
            ) from error


class Trainer:
    """One run in one directory."""

    def __init__(
        self,
        config: TrainConfig,
        source: sources.Source,
        dataset: Dataset,
        towers: list[Tower],
        stop: "ShutdownHandler",
        clock: PhaseTimer,
        team: Coordinator,
        strategy: tf.distribute.Strategy | None = None,
        launch_id: str = "",
    ):
        self.launch_id = launch_id
        self.dataset, self.stop, self.clock, self.team = dataset, stop, clock, team
        self.here = towers_here(strategy, towers) if strategy else towers
        self.directory = config.directory
        self.precision = devices.choose_precision(config.precision, self.here)
        agreement.assert_workers_agree(team, dataset, self.precision, len(self.here))
        count = config.examples_drawn * len(self.here) // len(towers)
        self.batches = build.make_batches(config, dataset.train, rows=(team.index * count, count))
        self.length = config.run_length(self.batches.steps_per_epoch)
        self.config = config = auto_placement.resolve_placement(config, towers, self.precision, dataset, self.length)
        self.state, self.train_step, self.towers = build.make_training(
            config, towers, self.precision, dataset.train, self.length, strategy
        )
        self.augmentation = build.make_augmentation(config, dataset.info)
        self.evaluate = make_evaluator(self.state.model, self.here, self.augmentation, team)
        self.facts = workdir.run_metadata(config, dataset, self.precision, len(self.towers))
        self.reporter = RunLogger(
            config, dataset, source.banner, self.here, self.towers, self.precision, self.state, self.length, clock,
            quiet=not team.is_chief,
        )  # fmt: skip
        self.say = self.reporter.say
        window = parse_profile_steps(config.profile_steps)
        if window and window[0] >= self.length.last:
            raise UsageError(
                f"profile_steps={config.profile_steps}: this run ends with step {self.length.last}; give earlier steps"
            )
        self.profile = StepProfiler(self.directory, *window) if window and team.is_chief else None
        self.side_at = schedules.ImageSizeSchedule(config.image_size_schedule, config.image_size).at(self.length)
        self.traced: set[tuple] = set()  # sides of the images, and groups of variables that move
        self.health = DivergenceState(config.max_nonfinite_steps)
        self.judge = HealthMonitor(
            self.health, self.state, self.towers, self.here, self.augmentation, config.micro_batches, team, self.say
        )
        every, keep = config.checkpoint_every_steps, config.keep_checkpoints
        self.keeper = CheckpointManager(self.directory, self.state, every, keep, self.say)
        self.reached = 0.0  # the accuracy that met the target

    def run(self) -> dict:
        """Prepares the directory, trains from where it stands, evaluates, and writes the result."""
        with contextlib.ExitStack() as stack:
            try:
                atomic_io.make(self.directory)
                ours = stack.enter_context(atomic_io.locked(self.directory / ".lock"))
            except OSError as error:
                done = "written" if self.directory.is_dir() else "made"
                raise UsageError(f"train_dir={self.directory} cannot be {done}: {error.strerror}") from error
            if not ours:
                raise UsageError(f"another process trains in {self.directory}; end it, or give another --train_dir")
            return self._run()

    def _run(self) -> dict:
        self.reporter.introduce()
        first_step = self._resume()
        last = self.length.last
        done = self.team.broadcast_from_chief(lambda: workdir.finished(self.directory, self.config, first_step, last))
        if done:
            self.say(f"{self.directory} is complete at step {first_step}: {told(done['evaluations'][-1])}")
            return done
        self.reporter.begin(first_step)
        self.stop.announce = self.say
        self.stop.check()
        self.stop.defer_signals()
        if self.team.size > 1:
            self.stop.require_consensus()
        try:
            return self._finish(self._train(first_step))
        finally:
            self._profile(StepProfiler.close)
            self.reporter.close()

    # The loop ---------------------------------------------------------------------------------------------------

    def _train(self, step: int) -> int:
        """Steps until the end, the target or a signal; the number of updates done."""
        self.clock.charge("start")
        if self.config.rollback_on_divergence and step == 0:
            self._save(0)
        while True:
            try:
                return self._train_from(step)
            except DivergedError as error:
                step = self._roll_back(error)

    def _train_from(self, first_step: int) -> int:
        step = first_step
        scores: list[dict] = []
        try:
            if self._at_evaluation(step):  # a signal may have come before it, in it, or right after it
                scores = self.team.broadcast_from_chief(lambda: self.reporter.evaluated(step))
                scores = scores or self._evaluate(step, tta=0, final=False)
                if self._reached_target(step, scores):
                    return step
            for batch in self.batches.stream(first_step, self.length.last):
                side = self.side_at(step)
                rates = self.state.optimizer.rates(step, self.health.rate_factor)
                first = (side, *rates) not in self.traced  # of its kind: it compiles, and is no measure of the others
                self.clock.charge("compile" if first else "input")
                self._profile(StepProfiler.before, step)
                metrics = self._step(step, batch, rates, side, first)
                self._profile(StepProfiler.after, step + 1)
                step, scores = step + 1, []
                self.judge(step, metrics, batch, rates, side)
                self.reporter.step(step, metrics, rates, side, self.health)
                self.clock.charge("compile" if first else "report")
                if self._at_evaluation(step):
                    scores = self._evaluate(step, tta=0, final=False)
                if step % self.length.steps_per_epoch == 0 or step == self.length.last:
                    self.reporter.end_epoch(step, rates, scores)
                if not self.health.in_a_row and step < self.length.last and self.keeper.due(step, bool(scores)):
                    self._save(step, scores)
                if self._reached_target(step, scores):
                    break
                self.stop.check()
        except Interrupted as stopped:
            self.stop.defer_signals()
            self.reporter.progress.pause()
            raise Interrupted(self.stop.signal, self._leave(step, scores)) from stopped
        if bad := self.state.first_nonfinite_variable():
            raise DivergedError(f"{bad} is not finite after step {step}")
        return step

    def _leave(self, step: int, scores: list[dict]) -> str:
        """Saves the last finished step, if there is one; what there is to say."""
        if not step:
            return NOTHING_TO_SAVE
        told = self.team.broadcast_from_chief(
            lambda: f"saved step {step}" if self._save(step, scores) else self.keeper.what_is_kept()
        )
        return f"{told}: the same command goes on from it"

    def _step(self, step: int, batch: Batch, rates: dict[str, float], side: int, first: bool) -> StepMetrics:
        has_diagnostics = self.reporter.wants_diagnostics(step + 1)
        with tf.device(HOST):
            rates = {name: tf.constant(rate, tf.float32) for name, rate in rates.items()}
            arguments = batch, rates, side, tf.constant(has_diagnostics)
            if self.team.size > 1:
                arguments = *arguments, tf.constant(self.stop.received_signal, tf.float32)
        if first:
            with self.stop.interruptible():  # it takes a while, and nothing has changed yet
                function = self.train_step.get_concrete_function(*arguments)
            if not self.traced:
                self.reporter.graph(function)
        metrics = self.train_step(*arguments)
        diagnostics = metrics.diagnostics if has_diagnostics else None
        metrics = to_numpy(metrics._replace(diagnostics=diagnostics))
        metrics = self._hear_others(metrics)
        self.clock.charge("compile" if first else "train")
        self.clock.count(0 if first else self.config.batch_size)
        self.traced.add((side, *rates))
        return metrics

    def _hear_others(self, metrics: StepMetrics) -> StepMetrics:
        """What the other workers add: whether to stop, and to a step that was looked at what their towers say."""
        if self.team.size > 1:
            self.stop.set_agreed_signal(int(metrics.stop_signal))
        return agreement.gather_diagnostics(self.team, metrics)

    def _profile(self, what: Callable, *step: int) -> None:
        """Lets the profile, if there is to be one, begin or end; what it says is said."""
        if self.profile and (lines := what(self.profile, *step)):
            self.reporter.progress.pause()
            self.say(lines)
            self.clock.charge("profile")

    def _roll_back(self, error: DivergedError) -> int:
        """Goes back to the checkpoint before the bad steps; the step it is of.

        Raises:
          DivergedError: the run is not to, or cannot.
        """
        if not self.config.rollback_on_divergence:
            kept = self.team.broadcast_from_chief(self.keeper.what_is_kept)
            raise DivergedError(
                f"{error}; {kept}: give --rollback_on_divergence to go back to the last good checkpoint at half the "
                "rates, or --overwrite with a smaller --learning_rate or --precision=float32"
            ) from error
        good_until = int(self.state.step.numpy()) - self.health.in_a_row
        self.health.roll_back(error)
        with jsonl.best_effort_writes(self.directory / run_files.ROLLBACKS):  # a checkpoint will know it only later
            run_files.write_json(self.directory / run_files.ROLLBACKS, {"rollbacks": self.health.rollbacks})
        step = self.team.broadcast_from_chief(lambda: self.keeper.go_back(good_until))
        if step is None:
            raise error
        agreement.broadcast_state(self.team, self.state.named_variables())
        self.reached = 0.0
        self.reporter.go_back(step)
        self.say(str(error))
        self.say(f"back to step {step}, on with {self.health.rate_factor:g} of the recipe's rates")
        return step

    def _reached_target(self, step: int, scores: list[dict]) -> bool:
        target = self.config.target_accuracy
        plain = [score for score in scores if score["tta"] == 0 and score["split"] == scores[0]["split"]]
        best = max((score["accuracy"] for score in plain), default=0.0)
        if not target or best < target or self.reached:
            return bool(self.reached)
        self.reached = best
        self.say(
            f"reached {100 * best:.2f} % on {plain[0]['split']} (target {100 * target:.2f} %) at step {step}, "
            f"after {self.clock.training_seconds:.1f} s of training"
        )
        return True

    # What happens now and then ----------------------------------------------------------------------------------

    def _evaluate(self, step: int, tta: int, final: bool) -> list[dict]:
        """Scores on validation where it exists, else test; on both at the end. Records and returns them."""
        splits = {"validation": self.dataset.validation, "test": self.dataset.test}
        splits = {name: split for name, split in splits.items() if len(split.labels)}
        if not final:
            splits = dict(itertools.islice(splits.items(), 1))
        scored = []
        for name, split in splits.items():
            for weights, values in self.state.evaluation_weights().items():
                with self.stop.interruptible():
                    levels = self.evaluate(split, *values, tta)
                scored += [(name, weights, level, score) for level, score in levels.items()]
        found = self.reporter.evaluation(step, scored, splits, final)
        self.clock.charge("evaluate")
        return found

    def _save(self, step: int, scores: Sequence[dict] = ()) -> bool:
        """Saves the state after `step`, or says why it cannot be; whether it is saved. The chief does, for all."""
        if not self.team.is_chief:
            return True
        facts = self.facts | {
            "accuracy": next((score["accuracy"] for score in reversed(scores)), None),
            "seconds": self.clock.seconds,
            "images": self.clock.images,
            **self.health.facts(),
        }
        try:
            return self.keeper.save(step, facts)
        finally:
            self.clock.charge("save")

    def _finish(self, step: int) -> dict:
        saved = self.team.broadcast_from_chief(lambda: self._save(step))
        self.stop.exit_immediately_from_now(
            f"step {step} is saved; the same command evaluates it" if saved else "nothing was saved"
        )
        self.reporter.drop_evaluation(step)  # of a try broken off
        scores = self._evaluate(step, self.config.tta, final=True)
        self._reached_target(step, scores)
        digest = self.state.digest()
        self.team.assert_equal({"weights, as sha256,": digest})
        result = {
            "step": step,
            "reached": self.reached,
            "dataset": self.dataset.name,
            "seconds": {name: round(spent, 3) for name, spent in self.clock.seconds.items()},
            "images_per_sec": self.clock.rate(),
            "weights_sha256": digest,
            "failed_saves": self.keeper.failed_saves,
            "bad_steps": self.health.bad_steps,
            "rollbacks": self.health.rollbacks,
            "evaluations": scores,
        }
        self.reporter.log_result(result)
        if not saved and not self._save(step):  # a last try: evaluation took a while
            raise RunError(f"step {step}, the last, could not be saved; make room, and the same command goes on")
        self.reporter.result(result)
        return result

    # The start --------------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Makes the directory ready and restores its newest checkpoint; the number of updates done."""
        workdir.check_ownership(self.directory)
        if self.config.overwrite:
            try:
                workdir.clear(self.directory, self.launch_id)
            except OSError as error:
                raise UsageError(
                    f"{self.directory} cannot be cleared: {error.strerror}; give another --train_dir"
                ) from error
        self.keeper.tidy()
        facts = self.team.broadcast_from_chief(self._restore)
        if not facts:
            return 0
        agreement.broadcast_state(self.team, self.state.named_variables())
        self.clock.resume(facts["seconds"], facts["images"])
        rolled_back = self.team.broadcast_from_chief(
            lambda: run_files.read_json_if_any(self.directory / run_files.ROLLBACKS)
        )
        self.health.resume(facts, rolled_back)
        towers = f"{facts['towers']} tower{'s' * (facts['towers'] > 1)}"
        self.say(f"going on from step {facts['step']}, saved with {towers} in {facts['precision']}")
        return facts["step"]

    def _restore(self) -> dict | None:
        """Gives the state the values of the newest checkpoint; what was saved with it."""
        found = workdir.newest(self.directory, self.config, self.dataset)
        if not found:
            return None
        checkpoint, facts = found
        self.keeper.restore(checkpoint)
        return facts

    def _at_evaluation(self, step: int) -> bool:
        every = self.config.eval_every_epochs
        steps = max(1, round(every * self.length.steps_per_epoch)) if every else 0
        return is_due(step, steps) and 0 < step < self.length.last
