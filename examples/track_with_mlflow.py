"""A training that MLflow follows: pip install mlflow && python examples/track_with_mlflow.py"""

import mlflow

import cifar_towers


class Tracker:
    """Callback that logs every record of a run."""

    def on_start(self, run):
        mlflow.start_run(run_name=run.name)
        mlflow.log_params(run.config)

    def on_step(self, step, metrics):
        mlflow.log_metrics(metrics, step)

    def on_evaluation(self, step, evaluation):
        name = evaluation["split"]
        if evaluation["tta"]:
            name += "_tta"
        mlflow.log_metrics(
            {f"{name}_{key}": evaluation[key] for key in ("accuracy", "loss", "ece")}, step
        )

    def on_end(self, run):
        mlflow.end_run()


if __name__ == "__main__":
    cifar_towers.train("smoke", callbacks=[Tracker()])
