#!/usr/bin/env python3
"""A peer: training with stock Keras layers and `fit`, optionally mirrored over K GPUs or CPUs."""

import os
import sys
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from cifar_towers.cli.program import import_tensorflow


def main() -> None:
    """Serve the steps of `fit`; needs the project's own requirements."""
    parser = protocol.make_parser(__doc__)
    parser.add_argument("--mirrored", type=int, default=1, help="replicas under MirroredStrategy; 1: no strategy")
    parser.add_argument("--untuned", action="store_true", help="leave oneDNN as TensorFlow chooses")
    args = parser.parse_args()
    data = protocol.load(args.data)
    if args.untuned:
        os.environ.pop("TF_ENABLE_ONEDNN_OPTS", None)  # the comparison that starts this has set it
    else:
        import_tensorflow()
    from cifar_towers.benchmark.worker import make_array_fit
    from cifar_towers.models import MODELS
    from cifar_towers.models.speednet import whitening_kernel
    from cifar_towers.registry import model_spec
    from cifar_towers.towers import make_towers
    from cifar_towers.training.build import POLICIES
    from scripts.speedrun.comparison import num_trained_parameters

    towers = make_towers(args.mirrored)
    options = {"image_size": data["images"].shape[1], "dtype": POLICIES[args.precision]}
    if model_spec(args.model).is_speednet:
        options["whitening"] = whitening_kernel([data["images"]])
    model = MODELS[args.model](**options)
    run = make_array_fit(model, towers, data["images"], data["labels"], args.batch_size)
    protocol.serve(run, num_trained_parameters(model))


if __name__ == "__main__":
    main()
