"""The accuracy at which a run may end."""

from collections.abc import Callable, Mapping, Sequence


class TargetAccuracy:
    """Whether a run's evaluations, without test-time augmentation, have reached a target.

    Args:
      target: a fraction; 0: none.
      log: prints the line that says so.

    Attributes:
      reached: the first accuracy that met the target; 0 until then.
    """

    def __init__(self, target: float, log: Callable[[str], None]):
        self.target, self.log, self.reached = target, log, 0.0

    def is_reached(self, step: int, evaluations: Sequence[Mapping], training_seconds: float) -> bool:
        """Whether these records of the evaluations after `step`, of which the first split counts, or earlier ones meet
        the target."""
        plain = [record for record in evaluations if record["tta"] == 0 and record["split"] == evaluations[0]["split"]]
        best = max((record["accuracy"] for record in plain), default=0.0)
        if self.target and not self.reached and best >= self.target:
            self.reached = best
            self.log(
                f"reached {100 * best:.2f} % on {evaluations[0]['split']} (target {100 * self.target:.2f} %) at step "
                f"{step}, after {training_seconds:.1f} s of training"
            )
        return bool(self.reached)
