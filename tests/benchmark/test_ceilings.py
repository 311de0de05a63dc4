import time

from cifar_towers.benchmark import ceilings


def test_ceilings_are_what_the_same_products_take(monkeypatch):
    """Smaller shapes: the rates are those of the calls, timed from outside."""
    monkeypatch.setattr(ceilings, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(ceilings, "SIDE", 256)
    start = time.perf_counter()
    found = ceilings.measure("float32", seconds=0.2)
    spent = time.perf_counter() - start
    convolution = 2 * 8 * 8 * 8 * 9 * 32 * 64 / 1e9
    assert convolution * ceilings.FEWEST / spent < found.convolution < 10_000
    assert 2 * 256**3 / 1e9 * ceilings.FEWEST / spent < found.matmul < 10_000
