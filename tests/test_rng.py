"""Draws are a function of their key alone: not of order, process, or hash seed."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.rng import digest, generator, stable_hash, uniforms

parts = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), max_size=4)


def test_pinned_values_so_that_a_change_of_the_scheme_breaks_old_runs_loudly() -> None:
    assert digest(1, "task", 2).hex() == "28d76fc6f4011400db2ceb06ef5ebc11"
    assert generator(7, "task", 0, 1).integers(1000, size=3).tolist() == [339, 489, 679]
    assert stable_hash("assay") == stable_hash(b"assay") == "8415c1d3050daa67"


@given(parts, parts)
def test_different_keys_have_different_digests(a, b) -> None:
    same = len(a) == len(b) and all(type(x) is type(y) and x == y for x, y in zip(a, b, strict=True))
    assert (digest(*a) == digest(*b)) is same


@pytest.mark.parametrize(
    ("a", "b"), [(("ab", "c"), ("a", "bc")), ((1, 23), (12, 3)), ((1,), ("1",)), (("",), ()), (("i1:1",), (1,))]
)
def test_boundaries_and_types_of_key_parts_matter(a, b) -> None:
    assert digest(*a) != digest(*b)


def test_numpy_integers_are_the_same_key_as_python_ones() -> None:
    assert digest(np.int64(5), "x") == digest(5, "x")


def test_the_order_of_asking_changes_no_draw() -> None:
    keys = [(step, task) for step in range(3) for task in range(3)]
    forward = {k: generator(0, "task", *k).random() for k in keys}
    backward = {k: generator(0, "task", *k).random() for k in reversed(keys)}
    assert forward == backward and len(set(forward.values())) == len(keys)


def test_seed_and_purpose_separate_streams() -> None:
    draws = {uniforms(seed, purpose, 1, n=1)[0] for seed in (0, 1) for purpose in ("sample", "task")}
    assert len(draws) == 4


def test_a_longer_request_begins_with_the_draws_of_a_shorter_one() -> None:
    long, short = uniforms(3, "sample", 1, 2, n=50), uniforms(3, "sample", 1, 2, n=8)
    np.testing.assert_array_equal(long[:8], short)
    assert long.dtype == np.float64 and (long >= 0).all() and (long < 1).all()


def test_neighbouring_keys_are_independent_and_uniform() -> None:
    grid = np.stack([uniforms(0, "sample", k, n=500) for k in range(40)])
    assert abs(grid.mean() - 0.5) < 4 * np.sqrt(1 / 12 / grid.size)
    correlation = np.corrcoef(grid)[~np.eye(40, dtype=bool)]
    assert np.abs(correlation).max() < 5 / np.sqrt(500)


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    code = "from assay.rng import digest, uniforms; print(digest('a', 1).hex(), uniforms(1, 'p', 'k', n=2).tolist())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{digest('a', 1).hex()} {uniforms(1, 'p', 'k', n=2).tolist()}\n"}
