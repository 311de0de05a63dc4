"""The model card of exports: a README.md in their directory, with the metadata that model hubs read."""

import json
import re
from hashlib import sha256
from pathlib import Path

from cifar_towers import files
from cifar_towers.errors import printable
from cifar_towers.evaluation.score import describe_score, wilson_interval
from cifar_towers.inference.load_run import TrainedRun
from cifar_towers.registry import split_path
from cifar_towers.reporting.run_records import read_run

EXAMPLES = {  # images -> probabilities, by the suffix of the export
    "": """import tensorflow as tf
net = tf.saved_model.load({!r}).signatures["serving_default"]
probabilities = net(images=tf.constant(images))["probabilities"].numpy()""",
    ".keras": """import keras
net = keras.models.load_model({!r})
probabilities = net(images)["probabilities"].numpy()""",
    ".tflite": """from ai_edge_litert.interpreter import Interpreter
net = Interpreter({!r}).get_signature_runner()
probabilities = net(images=images)["probabilities"]""",
    ".onnx": """import onnxruntime
net = onnxruntime.InferenceSession({!r})
(probabilities,) = net.run(["probabilities"], {{"images": images}})""",
}


def write_card(card: Path, export: Path, suffix: str, run: TrainedRun, weights: str, comment: str) -> str:
    """Write the card beside an export, and return a line about it. Other exports of the same checkpoint stay listed.

    Raises:
      OSError: the card cannot be written. DataError: a record of the run is damaged.
    """
    earlier, _, end = (card.read_text(errors="replace") if card.exists() else "").rpartition("\n")
    if card.exists() and end != _last_line(earlier):
        return f"{card} is kept: it is no model card, or was edited; for a new one, move it away and export again"
    step, record = run.metadata["step"], read_run(run.directory, run.directory.resolve().name)
    origin = f"{weights} weights of step {step}, checkpoint {files.sha256(run.checkpoint / files.MANIFEST)[:12]}"
    listed = re.findall(r"^`(.*)`:\n\n```python\n((?:.*\n)+?)```$", earlier, re.M) if origin in earlier else []
    examples = {name: code.rstrip() for name, code in listed if (card.parent / name).exists()}
    name = str(export.relative_to(card.parent))
    examples[name] = comment + EXAMPLES[suffix].format(name)
    known = [*record.evaluations, *({"step": record.result["step"], **s} for s in record.result.get("evaluations", []))]
    wanted = {"step": step, "split": "test", "weights": weights}
    scores = {score["tta"]: score for score in known if wanted.items() <= score.items()}
    accuracies = ""
    for score in scores.values():
        low, high = (100 * end for end in wilson_interval(score["accuracy"], score["count"]))
        accuracies += f"- {describe_score(score)}, 95 % interval {low:.2f} to {high:.2f} %\n"
    prefix, path = split_path(run.metadata["dataset"])
    data = json.dumps(prefix + Path(path).name, ensure_ascii=False)
    text = f"""---
library_name: keras
pipeline_tag: image-classification
datasets: {"[cifar10]" if data == '"cifar10"' else "[]"}
metrics: [accuracy]
model-index:
- name: {json.dumps(record.name, ensure_ascii=False)}
  results:
  - task: {{type: image-classification}}
    dataset: {{type: {data}, name: {data}, split: test}}
    metrics: {json.dumps([{"type": "accuracy", "value": scores[0]["accuracy"]}] if 0 in scores else [])}
---
# {record.name}

{record.banner}

An image classifier, trained on {data} by cifar_towers {record.environment.get("packages", {}).get("cifar-towers")},
revision {record.environment.get("git_revision")}, with recipe {Path(record.title).name} and seed {run.config.seed}.
The exports below have the {origin}. They compute without test-time augmentation (TTA). The accuracies are those of the
checkpoint, before any quantizing.

{accuracies or f"Step {step} was not evaluated on the test images."}
The input is uint8 images [B, H, W, 3] with any H and W. The central square is resized to {run.info.image_size} pixels
and normalized. The output `probabilities` [B, C] is float32, in this order: {", ".join(run.info.class_names)}.

```python
import numpy as np
from PIL import Image, ImageOps
picture = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("RGBA")  # scale 16 bits to 8 first
images = np.asarray(Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB"))[None]
```
"""
    text += "".join(f"\n`{name}`:\n\n```python\n{code}\n```\n" for name, code in sorted(examples.items()))
    text = "\n".join(map(printable, text.splitlines()))
    files.write_whole(card, f"{text}\n{_last_line(text)}")
    return f"{card}: the model card"


def _last_line(text: str) -> str:
    """Return the last line of a card. It tells a card that may be replaced from an edited one and from other files."""
    return f"<!-- written by cifar_towers; replaced while it is unchanged: {sha256(text.encode()).hexdigest()} -->"
