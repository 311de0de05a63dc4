"""Tags of a run in TensorBoard.

No tag holds a tower's name. The scalars of every tower have the same tags in a directory per tower, so that TensorBoard
overlays them in one chart.
"""

# Training, all towers together.
LOSS, ACCURACY, ECE = "loss", "accuracy", "ece"  # only evaluations have ECE; see `EVALUATED`
LOSS_TERMS, RAW = "losses", " (raw)"  # add the term: `losses/<term>` is smoothed, `losses/<term> (raw)` is not
GRADIENT_NORM = "health/gradient_norm"
SKIPPED_STEPS = "health/skipped_steps"
IMAGES_PER_SEC, STEP_SECONDS, INPUT_WAIT = "speed/images_per_sec", "speed/step_seconds", "speed/input_wait"
NOISE_SCALE = "towers/gradient_noise_scale"
LEARNING_RATE, PROXY = "learning_rate", "proxy"  # add the parameter group; `/loss` and `/accuracy`
MEMORY, GPU_UTILIZATION = "memory", "gpu_utilisation"  # add the device
# Each layer, weight and tower: add its name (a tower's name is its directory).
ACTIVATIONS, SPARSITY = "activations", "sparsity"
WEIGHTS, GRADIENTS = "weights", "gradients"
WEIGHT_NORM, WEIGHT_GRADIENT_NORM, UPDATE_RATIO = "weight_norm", "gradient_norm", "update_ratio"
TOWER_LOSS, TOWER_GRADIENT_NORM, TOWER_COSINE = "towers/loss", "towers/gradient_norm", "towers/cosine"
# Pictures, and the end of the run.
INPUT_IMAGES, MISTAKES, CONFUSION = "input/augmented", "mistakes", "confusion"
FINAL = "final"
# Key of a training record in metrics.jsonl -> tag of the same value.
RECORDED = {
    "loss": LOSS, "accuracy": ACCURACY, "gradient_norm": GRADIENT_NORM, "images_per_sec": IMAGES_PER_SEC,
    "input_wait": INPUT_WAIT, "skipped_steps": SKIPPED_STEPS, "gradient_noise_scale": NOISE_SCALE,
}  # fmt: skip
EVALUATED = (ACCURACY, LOSS, ECE)  # keys of an evaluation's record, and beginnings of their tags; see `score_tag`
