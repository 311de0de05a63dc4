#!/usr/bin/env python3
"""A net as most people would train it: stock Keras layers and `fit`, if asked to mirrored over K GPUs or CPUs."""

import sys
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cifar_towers.cli.tf_import import import_tensorflow


def main() -> None:
    """Needs what the project needs."""
    parser = protocol.parser(__doc__)
    parser.add_argument("--mirrored", type=int, default=1, help="replicas under MirroredStrategy; 1: no strategy")
    given = parser.parse_args()
    data = protocol.load(given.data, given.batch_size)
    import_tensorflow()
    from cifar_towers.benchmark import baselines
    from cifar_towers.models import MODELS
    from cifar_towers.models.speednet import whitening_kernel
    from cifar_towers.registry import model_spec
    from cifar_towers.towers import make_towers
    from cifar_towers.training.precision import POLICIES

    towers = make_towers(given.mirrored)
    options = {"side": data["images"].shape[1], "dtype": POLICIES[given.precision]}
    if model_spec(given.model).whitening:
        options["whitening"] = whitening_kernel([data["images"]])
    model = MODELS[given.model](**options)
    run = baselines.make_array_fit(model, towers, data["images"], data["labels"], given.batch_size)
    protocol.serve(run, given.batch_size, given.steps, baselines.num_trained_parameters(model))


if __name__ == "__main__":
    main()
