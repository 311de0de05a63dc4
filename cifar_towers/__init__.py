"""Train image classifiers on towers: synchronous data parallelism, readable from end to end.

`train` trains a run, and `load_run` reads one. The methods of a `Run` evaluate, predict and export,
as the programs do. `cifar_towers.towers` is for your own code.

Import this package before TensorFlow, which reads environment variables when it is imported. The
package sets `KERAS_BACKEND`, `TF_CPP_MIN_LOG_LEVEL`, `TF_ENABLE_ONEDNN_OPTS` and
`CUDA_DEVICE_ORDER`, unless you have set them. If TensorFlow was imported first, the package sets
none of them, and warns if `TF_ENABLE_ONEDNN_OPTS` is not set.
"""

import logging
import os
import sys

__all__ = ["Run", "load_run", "train"]
__version__ = "0.1.0"

if "tensorflow" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow enables oneDNN by default only on CPUs with AVX-512 VNNI; with AVX2 it gains as
    # much
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPUs are numbered as in nvidia-smi
elif "TF_ENABLE_ONEDNN_OPTS" not in os.environ:
    logging.getLogger(__name__).warning(
        "TensorFlow was imported before cifar_towers: on a CPU without AVX-512 VNNI it is slower "
        "and gives other weights; import cifar_towers first, or set TF_ENABLE_ONEDNN_OPTS=1"
    )

from cifar_towers.api import train  # after the environment is set
from cifar_towers.runs.run import Run, load_run
