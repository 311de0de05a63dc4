"""The comparison of frameworks: the nets that are written a second time, and the table."""

import random

import numpy as np
import pytest

from cifar_towers.errors import RunError
from cifar_towers.models import MODELS
from cifar_towers.models.speednet import Whitening
from scripts import compare_frameworks, peers

CASES = sorted(compare_frameworks.NETS.values())


@pytest.mark.parametrize(("net", "image_size", "batch_size"), CASES)
def test_the_net_of_keras_has_the_layers_and_parameters_of_ours(net, image_size, batch_size):
    ours, theirs = MODELS[net](image_size=image_size), peers.keras_net(net, image_size)
    trained = [layer.trainable_weights for layer in ours.layers if not isinstance(layer, Whitening)]
    shapes = [tuple(weight.shape) for weights in trained for weight in weights]
    assert shapes == [tuple(weight.shape) for weight in theirs.trainable_weights]
    assert sum(map(np.prod, shapes)) == peers.TRAINED_PARAMETERS[net]
    assert all(type(layer).__module__.startswith("keras.") for layer in theirs.layers)


@pytest.mark.parametrize("net", ["resnet20", "cifarnet"])
def test_the_net_of_keras_computes_what_ours_does(net):
    ours, theirs = MODELS[net](image_size=24), peers.keras_net(net, 24)
    layers = ([layer for layer in model.layers if layer.weights] for model in (ours, theirs))
    for mine, other in zip(*layers, strict=True):
        values = {weight.name: weight for weight in mine.weights}
        other.set_weights([values[weight.name].numpy() for weight in other.weights])
    images = np.random.default_rng(0).normal(size=(4, 24, 24, 3)).astype("f4")
    expected = ours(images, training=False).numpy()  # with a smaller epsilon in its norms
    np.testing.assert_allclose(
        theirs(images, training=False), expected, atol=0.02 * abs(expected).max()
    )


def test_a_framework_that_fails_is_left_out_and_the_table_compares_medians(monkeypatch, capsys):
    def rate_of_peer(framework, recipe, precision):
        if framework == "pytorch":
            raise RunError("no compiler")
        return {"keras": 50.0, "keras-onednn": 80.0}[framework] + random.random()

    monkeypatch.setattr(compare_frameworks, "rate_of_peer", rate_of_peer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(
        compare_frameworks, "rate_of_ours", lambda net, precision, jit_compile: 100.0
    )
    rates = compare_frameworks.measure(
        "resnet20", ("ours", "keras", "keras-onednn", "pytorch"), 3, "float32"
    )
    assert "pytorch is left out: no compiler" in capsys.readouterr().out
    assert {name: len(values) for name, values in rates.items()} == {
        "ours": 3,
        "keras": 3,
        "keras-onednn": 3,
    }
    rows = [row.split() for row in compare_frameworks.format_table(rates).splitlines()[1:]]
    assert [row[0] for row in rows] == ["ours", "keras-onednn", "keras"] and rows[0][1:] == [
        "100",
        "100-100",
        "1.00",
    ]
    assert float(rows[2][-1]) == pytest.approx(2, abs=0.05)
