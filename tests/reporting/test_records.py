import resource

from cifar_towers.reporting.records import JsonlWriter, read_records


def test_resuming_removes_later_records_and_incomplete_lines(tmp_path):
    metrics = JsonlWriter(tmp_path)
    path = tmp_path / "metrics.jsonl"
    for step in (5, 10, 15):
        metrics.write(kind="train", step=step)
    with path.open("a") as file:
        file.write('{"kind": "tr')  # a crash in the middle of a line
    metrics = JsonlWriter(tmp_path)
    metrics.keep(lambda record: record["step"] <= 10)
    metrics.write(kind="eval", step=11, loss=float("nan"))

    assert [record["step"] for record in read_records(path)] == [5, 10, 11]
    assert list(read_records(path))[-1] == {"kind": "eval", "step": 11, "loss": None}


def test_a_full_disk_is_one_warning_and_damages_no_other_line(tmp_path, caplog):
    """The disk is full in the middle of a line."""
    metrics = JsonlWriter(tmp_path)
    path = tmp_path / "metrics.jsonl"
    metrics.write(kind="train", step=1)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        for step in (2, 3):
            metrics.write(kind="train", step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert len(caplog.records) == 1
    assert str(path) in caplog.text

    metrics.write(kind="train", step=4)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    metrics.write(kind="train", step=5)

    assert [record["step"] for record in read_records(path)] == [1, 4, 5]
