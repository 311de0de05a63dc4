"""Tags under which a run writes to TensorBoard; `charts` has the titles of charts made of them.

No tag holds a tower's name: what is written for each tower has one tag and a directory for every tower, which
TensorBoard overlays in one chart.
"""

# Training, all towers together.
LOSS, ACCURACY = "loss", "accuracy"  # evaluations add `/<split>/<weights>`
GRADIENT_NORM, LOSS_SCALE = "health/gradient_norm", "health/loss_scale"
BAD_STEPS, ROLLBACKS = "health/bad_steps", "health/rollbacks"
IMAGES_PER_SEC, STEP_SECONDS, INPUT_WAIT = "speed/images_per_sec", "speed/step_seconds", "speed/input_wait"
NOISE_SCALE = "towers/gradient_noise_scale"
LEARNING_RATE, PROXY = "learning_rate", "proxy"  # add the parameter group; `/loss` and `/accuracy`
MEMORY, GPU_UTILIZATION = "memory", "gpu_utilisation"  # add the device
# Each layer, weight, tower and class: add its name (a tower's is its directory).
ACTIVATIONS, SPARSITY = "activations", "sparsity"
WEIGHTS, GRADIENTS = "weights", "gradients"
WEIGHT_NORM, WEIGHT_GRADIENT_NORM, UPDATE_RATIO = "weight_norm", "gradient_norm", "update_ratio"
TOWER_LOSS, TOWER_GRADIENT_NORM, TOWER_COSINE = "towers/loss", "towers/gradient_norm", "towers/cosine"
CLASS_ACCURACY, PRECISION_RECALL = "class_accuracy", "precision_recall"
# Pictures, and the end of the run.
INPUT_IMAGES, MISTAKES, CONFUSION = "input/augmented", "mistakes", "confusion"
FINAL = "final"
# Statistics over seeds: begin the tag of what they are of. The mean has the tag of the single runs.
SEED_MEAN, SEED_STD, SEED_COUNT = "", "std/", "n/"
SEED_LOW, SEED_HIGH = "mean-std/", "mean+std/"


RAW = " (raw)"  # ends the tag of a loss that is not smoothed


def raw_loss(term: str) -> str:
    """Tag of a loss term of the final tower in one step."""
    return f"losses/{term}{RAW}"


def smoothed_loss(term: str) -> str:
    """Tag of a loss term's moving average."""
    return f"losses/{term}"
