"""The program: `python -m scripts.speedrun --help`, in the root of a checkout."""

from cifar_towers.cli.program import find_data, parse, program
from cifar_towers.shutdown import ShutdownHandler
from scripts.speedrun.settings import SpeedrunConfig


@program
def main(shutdown: ShutdownHandler) -> None:
    """Time a recipe over seeds, each in its own process, and compare its training step with those of other frameworks.
    The same command resumes. Runs are evaluated only at their end. The default recipe is speed94.

      python -m scripts.speedrun --recipe=speed94 --target=0.94 --seeds=0,1,2
    """
    config = parse(SpeedrunConfig, main)
    shutdown.exit_immediately_from_now("finished seeds are kept; the command without --overwrite resumes")
    source = find_data(config.recipe)
    from scripts.speedrun import seeds

    seeds.run_speedrun(config, source)


if __name__ == "__main__":
    main()
