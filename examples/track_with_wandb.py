"""A training that Weights & Biases follows: pip install wandb && python
examples/track_with_wandb.py
"""

import wandb

import cifar_towers


class Tracker:
    """Callback that logs every record of a run."""

    def on_start(self, run):
        self.tracked = wandb.init(project="cifar", name=run.name, config=run.config)

    def on_step(self, step, metrics):
        self.tracked.log(metrics, step)

    def on_evaluation(self, step, evaluation):
        name = evaluation["split"]
        if evaluation["tta"]:
            name += "_tta"
        self.tracked.log(
            {f"{name}/{key}": evaluation[key] for key in ("accuracy", "loss", "ece")}, step
        )

    def on_end(self, run):
        self.tracked.finish()


if __name__ == "__main__":
    cifar_towers.train("smoke", callbacks=[Tracker()])
