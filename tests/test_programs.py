"""The programs as a user starts them: exit codes, messages, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = pytest.mark.slow
TINY = ["--dataset=synthetic", "--model=cifarnet", "--crop=24", "--shift=0", "--batch_size=200", "--precision=float32"]


def start(program, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process, timeout=120):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


PROGRAMS = [
    "train.py",
    "evaluate.py",
    "predict.py",
    "export.py",
    "benchmark.py",
    "speedrun.py",
    "report.py",
    "compare_runs.py",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_answers_without_what_is_slow_to_import(program):
    code, out, err = finish(start(program, "--help"))
    assert code == 0 and "Exit codes" in out and not err
    source = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path('scripts/{program}', run_name='__main__')"
    slow = "{'numpy', 'tensorflow', 'keras', 'matplotlib', 'rich'} & {*sys.modules}"
    checked = f"try:\n {source}\nexcept SystemExit: print({slow})"
    told = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("program", "arguments", "code", "told"),
    [
        ("train.py", ["--batch_sise=3"], 2, "Did you mean: batch_size"),
        ("train.py", ["here"], 2, "'here' is not a flag"),
        ("train.py", ["--num_gpus=2", "--nosoft_placement", *TINY], 2, "2 towers need 2 GPUs"),
        pytest.param("train.py", ["--batch_size=20000", "--dataset=synthetic"], 2, "more than the 10000", marks=SLOW),
        pytest.param("train.py", ["--batch_size=1001", "--dataset=synthetic"], 2, "1000 and 1002 can", marks=SLOW),
        ("evaluate.py", ["--train_dir=nowhere"], 2, "no checkpoint in nowhere"),
        ("predict.py", ["--train_dir=no\x1bwhere", "picture.png"], 2, "no checkpoint in no\\x1bwhere"),
        ("predict.py", ["picture.png"], 2, "which run? give --train_dir"),
        (
            "export.py",
            ["--train_dir=nowhere", "--format=tensorrt"],
            2,
            "format=tensorrt is not one of saved_model, keras",
        ),
        ("train.py", ["--dataset=folder:nowhere"], 3, "nowhere cannot be read: No such file or directory"),
        ("train.py", ["--model=nowhere.py:net", "--dataset=synthetic"], 2, "model=nowhere.py:net: there is no file"),
        ("benchmark.py", ["--towers=5"], 2, "1535 and 1540 can"),
        ("speedrun.py", ["--seeds=", "--rounds=0"], 2, "leave nothing to do"),
        pytest.param(
            "benchmark.py",
            ["--towers=2", *TINY, "--nosoft_placement", "--train_dir=."],
            2,
            "2 towers need 2 GPUs",
            marks=SLOW,
        ),
    ],
)
def test_errors_are_one_line_and_a_code(tmp_path, program, arguments, code, told):
    found, out, err = finish(start(program, *arguments, CUDA_VISIBLE_DEVICES=""))
    assert found == code and told in err
    assert "Traceback" not in out + err
    assert len([line for line in err.splitlines() if line.startswith(("usage:", "data:"))]) == 1


def test_a_backend_that_has_no_towers():
    code, _, err = finish(start("train.py", *TINY, KERAS_BACKEND="jax"))
    assert code == 2 and "KERAS_BACKEND=jax" in err


def test_a_run_into_a_pipe_is_plain_and_quiet(tmp_path):
    code, out, err = finish(start("train.py", *TINY, "--max_steps=4", f"--train_dir={tmp_path}", "--num_gpus=2"))
    assert code == 0, err
    assert "\x1b" not in out and "\r" not in out
    assert "4 steps of 200" in out and "2 towers of 100 images on /CPU:0, /CPU:1" in out
    assert "no GPU here: 2 towers on logical CPU devices" in err
    assert not [line for line in err.splitlines() if "cuda" in line.lower() or "onednn" in line.lower()]
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=SLOW)])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, number, code):
    command = [
        "train.py",
        *TINY,
        "--max_steps=40",
        f"--train_dir={tmp_path}",
        "--num_gpus=2",
        "--summary_every_steps=1",
    ]
    process = start(*command)
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    found, _, err = finish(process)
    assert found == code and "saved step" in err and "Traceback" not in err
    if number == signal.SIGINT:
        return  # going on is the same
    found, out, err = finish(start(*command))
    assert found == 0 and "going on from step" in out, err


@pytest.mark.slow
def test_two_processes_with_one_seed_give_the_same_bits(tmp_path):
    runs = [start("train.py", *TINY, "--max_steps=4", f"--train_dir={tmp_path / name}") for name in "ab"]
    assert [finish(process)[0] for process in runs] == [0, 0]
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in "ab")
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["evaluations"] == second["evaluations"]


@pytest.mark.slow
def test_evaluate_scores_what_train_left(tmp_path):
    """In a process of its own: the data must not wake TensorFlow before the towers do."""
    code, out, err = finish(start("train.py", *TINY, "--max_steps=2", "--deterministic", f"--train_dir={tmp_path}"))
    assert code == 0, err
    shared = [f"--train_dir={tmp_path}", "--json", "--precision=float32", "--num_gpus=2"]
    code, out, err = finish(start("evaluate.py", *shared))
    assert code == 0, err
    trained = json.loads((tmp_path / "result.json").read_text())["evaluations"][0]["accuracy"]
    assert json.loads(out)["accuracy"] == pytest.approx(trained, abs=0.001)


@pytest.mark.slow
def test_output_onto_a_full_disk_ends_no_run(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / "scripts/train.py"), *TINY, "--max_steps=2", f"--train_dir={tmp_path}"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 2


@pytest.mark.slow
def test_comparing_what_is_no_run(tmp_path):
    assert finish(start("compare_runs.py", "--help"))[0] == 0
    assert finish(start("compare_runs.py", str(tmp_path)))[0] == 2
    code, _, err = finish(start("compare_runs.py", str(tmp_path), str(tmp_path)))
    assert code == 2 and "holds no config.json; give two runs' directories" in err


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = finish(start("train.py", *TINY, f"--train_dir={tmp_path / 'file' / 'run'}"))
    assert code == 2 and "cannot be made: Not a directory" in err and "Traceback" not in err


def test_a_signal_before_the_first_step(tmp_path):
    process = start("train.py", *TINY, f"--train_dir={tmp_path}")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    found, _, err = finish(process)
    assert found == 143 and "Traceback" not in err


@pytest.mark.slow
def test_a_benchmark_from_start_to_sentence(tmp_path):
    """One step a visit, two towers: all that is measured of them, and what it is written to."""
    flags = ["--towers=2", "--precisions=float32", "--minutes=0", "--nopeers", f"--train_dir={tmp_path}"]
    code, out, err = finish(start("benchmark.py", *TINY, *flags, CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    told = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {tuple(row["variation"][key] for key in ("strategy", "placement", "input")): row for row in told["rows"]}
    assert set(rows) == {
        *(("towers", placement, "constant") for placement in ("cpu", "round_robin", "least_loaded")),
        ("towers", "cpu", "stream"),
        ("mirrored", "-", "constant"),
        ("no exchange", "-", "constant"),
    }
    for row in rows.values():
        assert len(row["images_per_sec"]) == 3 and min(row["images_per_sec"]) > 1
        assert row["memory_mb"] > 100 and row["compile_seconds"] > row["median"] ** -1
    shares = rows["towers", "cpu", "constant"]["shares"]
    assert shares["forward"] > 0.1 and shares["backward"] > 0.2 and 0 < shares["apply"] < 0.5
    assert rows["no exchange", "-", "constant"]["shares"] == {}
    assert told["conclusion"].startswith("This machine is bound by ") and told["conclusion"] in out
    assert {path.name for path in tmp_path.iterdir()} >= {"benchmark.txt", "benchmark.png", "index.html"}


@pytest.mark.slow
def test_a_prediction_from_one_tower(tmp_path):
    flags = ["--predict", "--link_gb_per_s=2", "--precisions=float32", "--minutes=0", f"--train_dir={tmp_path}"]
    code, out, err = finish(start("benchmark.py", *TINY, *flags, CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    told = json.loads((tmp_path / "prediction.json").read_text())
    assert not (tmp_path / "benchmark.json").exists()
    rows = {(row["way"], row["num_towers"]): row for row in told["predictions"]}
    assert {count for _, count in rows} == {1, 2, 4, 8, 16, 32, 64}
    assert rows["ring", 1]["compute_seconds"] == pytest.approx(200 / told["measured"]["median"])
    # the host sends 200 examples; each device sends half of 1,068,298 four-byte weights to the other, twice
    assert rows["ring", 2]["transfer_seconds"] == pytest.approx((1068298 * 4 + 200 * 3105) / 2e9, rel=0.01)
    assert "ring" in out and "efficiency" in out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--num_workers=5", "--", "--batch_size=999"],
            "batch_size=999 cannot be shared by 5 towers; 995 and 1000 can",
        ),
        (["--num_workers=1"], "num_workers=1 is no cluster"),
        (["speed94"], "'speed94' is not a flag of train.py"),
        (["--", "--seeds=0,x"], "seeds=0,x is not a list of whole numbers"),
    ],
)
def test_a_launcher_starts_nothing_that_cannot_train(flags, told):
    code, _, err = finish(start("launch.py", *flags))
    assert code == 2 and told in err and len(err.splitlines()) == 1
