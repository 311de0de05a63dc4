"""When skipped steps end a run, and what rollbacks do to its learning rates."""

import pytest

from cifar_towers.errors import DivergedError
from cifar_towers.training import health


def test_too_many_bad_steps_in_a_row_end_a_run():
    patient = health.DivergenceState(2)
    line = patient.record_bad_step(7, "the reason")
    assert all(part in line for part in ("step 7 ", "1 in a row", "2 ", "the reason"))
    patient.record_good_step()
    patient.record_bad_step(9, "x")
    with pytest.raises(DivergedError, match="step 10 .*2 in a row"):
        patient.record_bad_step(10, "x")
    assert patient.metadata() == {"skipped_steps": 3, "bad_in_a_row": 2, "rollbacks": 0}


def test_every_rollback_halves_the_rates_up_to_a_limit():
    patient, error = health.DivergenceState(1), DivergedError("the last")
    for number in range(1, health.MAX_ROLLBACKS + 1):
        patient.roll_back(error)
        assert patient.rate_factor == 0.5**number and patient.in_a_row == 0
    with pytest.raises(DivergedError, match="the last"):
        patient.roll_back(error)
    later = health.DivergenceState(1)
    later.restore({"skipped_steps": 4, "bad_in_a_row": 1, "rollbacks": 2})
    assert later.metadata() == {
        "skipped_steps": 4,
        "bad_in_a_row": 1,
        "rollbacks": 2,
    }  # killed before it was saved again
