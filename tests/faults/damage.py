"""Damage to saved checkpoints that the next start must detect; and the ways to damage a file's bytes."""

import functools
import random
import re

from tests.faults import harness, subjects
from tests.faults.harness import Experiment, Trial, check

BYTE_FAULTS = ("flip a bit", "change a byte", "truncate", "empty", "zero a block", "zero", "garble")
TREE_FAULTS = (
    *["damage a file"] * len(BYTE_FAULTS),
    *("delete a file", "swap files", "swap checkpoints", "delete a checkpoint"),
)
STEPS = (1, 2, 3)
END_BYTES = 200
Tree = dict[str, bytearray]  # path -> content


def damage_checkpoint(trial: Trial) -> str:
    """Guaranteed: weights of the newest intact step, or of a newer one; a refusal if no checkpoint is intact."""
    saved = _saved_tree(trial.subject)
    damaged = saved
    while damaged == saved:  # as when a block of zeros is zeroed
        damaged = {name: bytearray(content) for name, content in saved.items()}
        trial.details = _damage_tree(trial.rng, damaged)
    for name, content in damaged.items():
        path = trial.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    checkpoints = list(_by_checkpoint(saved).values())
    steps = STEPS[-len(checkpoints) :]
    intact = [all(damaged.get(name) == saved[name] for name in names) for names in checkpoints]
    newest_intact = max(step for step, is_intact in zip((0, *steps), (True, *intact), strict=True) if is_intact)
    step, state = harness.in_worker(subjects.recover, trial.subject, trial.scratch)
    if state.startswith("refused"):
        check(not newest_intact, state)
        return f"{state}, none intact"
    check(state == "intact", state)
    check(step in steps, f"restart at {step}")
    check(step >= newest_intact, "an older one taken")
    return "newest taken" if step == STEPS[-1] else "older taken"


@functools.cache
def _saved_tree(subject: str) -> dict[str, bytes]:
    """Return the files that a subject leaves after three saves."""
    with harness.scratch_directory() as scratch:
        root = scratch / "run"

        def save() -> None:
            save_step = subjects.make_save(subject, root)
            for step in STEPS:
                save_step(step)

        with harness.Child(save, scratch / "output") as child:
            child.wait()
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def _by_checkpoint(tree: Tree) -> dict[str, list[str]]:
    """Return the files of each checkpoint, oldest first; of two backups, `.bkp` is the older."""
    checkpoints: dict[str, list[str]] = {}
    for name in sorted(tree, key=lambda name: (not name.endswith(".bkp"), name)):
        numbered = re.search(r"(step|ckpt)-\d+", name)
        if name != "checkpoint":  # the manager's index
            key = numbered[0] if numbered else "the backup" if name.endswith(".bkp") else "the newest"
            checkpoints.setdefault(key, []).append(name)
    return checkpoints


def _damage_tree(rng: random.Random, tree: Tree) -> str:
    """Damages checkpoints in place; returns a description."""
    fault, checkpoints = rng.choice(TREE_FAULTS), _by_checkpoint(tree)
    if fault == "swap checkpoints":
        (one, names), (other, other_names) = rng.sample(list(checkpoints.items()), 2)
        for a, b in zip(names, other_names, strict=True):
            tree[a], tree[b] = tree[b], tree[a]
        return f"{one} and {other} swapped"
    if fault == "delete a checkpoint":
        name, files = rng.choice(list(checkpoints.items()))
        for file in files:
            del tree[file]
        return f"{name} deleted"
    *_, newest = checkpoints.values()
    name = rng.choice(newest if rng.random() < 0.5 else list(tree))
    if fault == "damage a file":
        return f"{name}: {damage_bytes(rng, tree[name], rng.choice(BYTE_FAULTS))}"
    if fault == "delete a file":
        del tree[name]
        return f"{name} deleted"
    other = rng.choice([other for other in tree if other != name])
    tree[name], tree[other] = tree[other], tree[name]
    return f"{name} and {other} swapped"


def damage_bytes(rng: random.Random, content: bytearray, fault: str) -> str:
    """Damages the content of a file in place; returns a description."""
    match fault:
        case "flip a bit":
            position, bit = _position(rng, len(content)), rng.randrange(8)
            content[position] ^= 1 << bit
            return f"bit {bit} of byte {position} flipped"
        case "change a byte":
            position = _position(rng, len(content))
            content[position] ^= rng.randrange(1, 256)
            return f"byte {position} set to {content[position]}"
        case "truncate":
            del content[rng.randrange(1, len(content)) :]
            return f"truncated to {len(content)} bytes"
        case "empty":
            content.clear()
            return "emptied"
        case "zero a block":
            start = rng.randrange(0, len(content), 512)
            content[start : start + 512] = bytes(len(content[start : start + 512]))
            return f"512 bytes from {start} zeroed"
        case "zero":
            content[:] = bytes(len(content))
            return "zeroed"
    size = rng.choice((len(content), rng.randrange(1, 2 * len(content))))
    content[:] = rng.randbytes(size)
    return f"replaced by {size} random bytes"


def _position(rng: random.Random, size: int) -> int:
    """Every second time near the beginning or end of a file, where most formats say how to read the rest."""
    position = rng.randrange(size)
    return rng.choice((position, position, position % END_BYTES, size - 1 - position % END_BYTES)) % size


EXPERIMENTS = [Experiment("damaged checkpoint", subjects.ALL, 60, 1000, damage_checkpoint)]
