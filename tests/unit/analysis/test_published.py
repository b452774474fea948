"""The published models' shapes, and the nearest of them."""

from math import nan, sqrt

import numpy as np
import pytest

from dynscope.analysis.published import PROTOCOL_ERROR, PUBLISHED, nearest


def test_the_table_is_the_papers() -> None:
    known = {one.name: one for one in PUBLISHED}
    assert len(known) == 12
    assert known["Pythia 70M"].k == {"qkv": 1.0488, "o": 1.1838, "in": 1.1903, "out": 1.1898}
    assert known["OLMo 1"].k["q"] == 0.8123 and known["OLMo 1"].k["down"] == 1.2041
    assert [one.saturation for one in PUBLISHED[:5]] == [1.43, 0.86, 0.43, 0.43, 0.17]
    gated = [one.k["gate"] for one in PUBLISHED if "gate" in one.k]
    assert len(gated) == 7 and all(1.186 <= k <= 1.204 for k in gated)


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda one: one.name)
def test_a_published_model_is_nearest_to_itself(model) -> None:  # type: ignore[no-untyped-def]
    moved = {role: k + 1e-4 for role, k in model.k.items()}
    first, *others = nearest(moved, dict.fromkeys(moved, 1e-3))
    assert first.model is model and first.distance == pytest.approx(1e-4)
    assert all(one.distance > first.distance for one in others)
    assert set(first.roles) == set(model.k)


def test_the_uncertainty_is_the_spread_of_distances_that_are_measured_again() -> None:
    random = np.random.default_rng(0)
    k = {"q": 1.10, "k": 1.08, "o": 1.19, "gate": 1.196, "up": 1.2, "down": 1.2}
    error = {"q": 0.004, "k": 0.003, "o": 0.002, "gate": 0.001, "up": 0.001, "down": 0.001}
    found = {one.model.name: one for one in nearest(k, error)}["Llama 3 8B"]
    again = []
    for _ in range(4000):
        apart = []
        for role, value in k.items():
            own = value + random.normal(0, error[role])
            theirs = found.model.k[role] + random.uniform(-PROTOCOL_ERROR, PROTOCOL_ERROR)
            apart.append(own - theirs)
        again.append(sqrt(np.mean(np.square(apart))))
    assert found.uncertainty == pytest.approx(np.std(again), rel=0.1)


def test_few_roles_in_common_are_no_comparison() -> None:
    assert nearest({"q": 1.1, "k": 1.1}, {}) == ()
    assert nearest({"q": 1.1, "k": 1.1, "v": nan}, {}) == ()
    merged = nearest({"qkv": 1.1, "o": 1.19, "in": 1.19, "out": 1.2}, {"qkv": nan})
    assert {one.model.name.split()[0] for one in merged} == {"Pythia"}
    assert all(one.uncertainty > 0 for one in merged)
