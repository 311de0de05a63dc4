"""The table of docs/scale.md: `python -m scripts.scaling.table`. Change the constants for a machine of your own."""

from cifar_towers.models import MODELS
from cifar_towers.towers.pipeline import layer_costs
from scripts.scaling.communication import predict, variable_bytes

RATED, IMAGES_PER_SEC = "speednet94", 100_000  # on one device; other models take time in proportion to operations
BATCHES = {"speednet94": 1024, "speednet96": 512, "resnet20": 128}
LINKS = {  # 10^9 bytes a second, seconds per message
    "10 Gbit/s, TCP": (1.25, 20e-6),
    "100 Gbit/s, TCP": (12.5, 20e-6),
    "100 Gbit/s, RDMA": (12.5, 2e-6),
    "400 Gbit/s, RDMA": (50.0, 2e-6),
}
MAX_DEVICES = 1024


def make_table() -> str:
    """Return the first number of devices whose efficiency is below one half, by model, batch and link, as Markdown."""
    models = {name: MODELS[name](image_size=32) for name in {RATED, *BATCHES}}
    flops = {name: sum(layer["flops"] for layer in layer_costs(model)) for name, model in models.items()}
    lines = [f"| | {' | '.join(LINKS)} |", "| --- |" + " --- |" * len(LINKS)]
    for name, batch in BATCHES.items():
        seconds = batch / (IMAGES_PER_SEC * flops[RATED] / flops[name])  # of a step on one device
        for each in (False, True):
            counts = [2**power for power in range(1, MAX_DEVICES.bit_length()) if each or 2**power <= batch]
            cells = []
            for gb_per_s, latency in LINKS.values():
                steps = predict(
                    seconds,
                    variable_bytes(models[name]),
                    batch,
                    example_bytes=0,  # every worker prepares its own images
                    link_gb_per_s=gb_per_s,
                    num_towers=counts,
                    exchanges=["ring"],
                    per_device_batch=each,
                    latency_seconds=latency,
                )
                below = [step.num_towers for step in steps if step.efficiency < 0.5]
                cells.append(f"{below[0]:,}" if below else f"above {counts[-1]:,}")
            lines.append(f"| `{name}`, {batch:,} {'each' if each else 'shared'} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table())
