"""The program: `python -m scripts.scaling --help`, in the root of a checkout."""

import dataclasses

from cifar_towers.cli.program import find_data, parse, program
from cifar_towers.shutdown import ShutdownHandler
from scripts.scaling.settings import ScalingConfig


@program
def main(shutdown: ShutdownHandler) -> None:
    """Measure a recipe's step on one tower of this machine, and compute its time and efficiency on 1 to 64 devices with
    links of --link_gb_per_s. The default recipe is speed94.

      python -m scripts.scaling --recipe=speed94 --link_gb_per_s=16
    """
    config = parse(ScalingConfig, main)
    recipe = dataclasses.replace(config.recipe, hard_example_pool=0)  # the bare step, without selecting examples
    shutdown.exit_immediately_from_now("nothing was written; the same command starts again")
    source = find_data(recipe)
    from scripts.scaling import prediction

    prediction.run_prediction(dataclasses.replace(config, recipe=recipe), source)


if __name__ == "__main__":
    main()
