"""What a run does with the other workers of a cluster; for a run of one machine there is nothing to do."""

import numpy as np

from cifar_towers.data.dataset import Dataset
from cifar_towers.multi_worker.coordination import Team
from cifar_towers.training.diagnostics import ForwardDiagnostics
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import StepMetrics


def assert_workers_agree(team: Team, dataset: Dataset, compute_dtype: str, towers: int) -> None:
    """Makes sure that all workers have the same data and compute alike, each on so many towers.

    Raises:
      UsageError: naming the worker and what differs.
    """
    data = {f"{name} images, as sha256,": getattr(dataset, name).digest for name in ("train", "test")}
    team.agree({"precision": compute_dtype, "towers": towers, **data})


def broadcast_state(team: Team, state: TrainState) -> None:
    """Gives all workers the chief's values."""
    if team.size > 1:
        variables = state.named_variables()
        values = team.from_chief(lambda: {name: v.numpy() for name, v in variables.items()})
        for name, value in {} if team.chief else values.items():
            variables[name].assign(value)


def gather_diagnostics(team: Team, metrics: StepMetrics) -> StepMetrics:
    """The metrics of a step with what the towers of other workers add to one that was looked at closely."""
    if team.size == 1 or not metrics.diagnostics:
        return metrics
    final = team.index == team.size - 1
    look = list(metrics.diagnostics.look) if final else None
    brought = team.gather({"towers": metrics.diagnostics.towers, "look": look})
    towers = np.concatenate([one["towers"] for one in brought])
    return metrics._replace(
        diagnostics=metrics.diagnostics._replace(look=ForwardDiagnostics(*brought[-1]["look"]), towers=towers)
    )
