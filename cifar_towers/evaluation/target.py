"""The accuracy at which a run may end."""

from collections.abc import Mapping, Sequence


class TargetAccuracy:
    """Whether a run's evaluations, without test-time augmentation, have reached a target.

    Args:
      target: a fraction; 0: none.

    Attributes:
      reached: the first accuracy that met the target; 0 until then.
    """

    def __init__(self, target: float):
        self.target, self.reached = target, 0.0

    def update(self, evaluations: Sequence[Mapping]) -> bool:
        """Takes the records of one step's evaluations, of which the first split counts; whether they met the target."""
        plain = [record for record in evaluations if record["tta"] == 0 and record["split"] == evaluations[0]["split"]]
        best = max((record["accuracy"] for record in plain), default=0.0)
        if self.reached or not self.target or best < self.target:
            return False
        self.reached = best
        return True
