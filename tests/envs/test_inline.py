"""Environments in this process answer as those in workers do."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.build import build
from assay.config import resolve
from assay.envs.inline import Inline, open_pool
from assay.envs.workers import Ask, Pool
from assay.protocols import Reset, Restore, Snapshot, Step, StepResult, UserError
from assay.train import train

sys.path.insert(0, str(Path(__file__).parent))  # "toy:Line"

TASKS = range(6)
ADDRESS = re.compile("0x[0-9a-f]+")
RUN = {
    "env": "countdown",
    "model": "tiny-300k",
    "steps": 2,
    "tasks_per_step": 2,
    "rollouts_per_task": 4,
    "max_turn_tokens": 8,
    "learning_rate": 1e-3,
    "warm_start": {"episodes": 8},
    "evaluation": {"tasks": 3, "ood": False},
}


def ask(pool: Any, *requests: Any) -> list[Any]:
    """One request a slot, in every slot."""
    for slot in TASKS:
        pool.submit(slot, requests[0] if len(requests) == 1 else requests[slot])
    return pool.collect(TASKS)


def start(pool: Any) -> list[StepResult]:
    return ask(pool, *(Reset("train", slot) for slot in TASKS))


def both(name: str, conversation: Callable[[Any], Any], **settings: Any) -> Any:
    """What a conversation gives with workers and without, which must be the same, as are spec and counters."""
    found = []
    for workers in (1, 0):
        with open_pool(name, settings, workers, 30.0) as pool:
            assert isinstance(pool, Pool if workers else Inline)
            found.append((conversation(pool), pool.spec, pool.counters, pool.stray))
    worker, ours = (ADDRESS.sub("0x", repr(one)) for one in found)  # of an object that an error names
    assert worker == ours
    return found[1][0]


def test_answers_spec_and_counters_are_those_of_a_worker() -> None:
    talk = lambda pool: [start(pool), *(ask(pool, Step(a)) for a in ("R", "Lx", "?", "S", "R"))]  # noqa: E731
    got = both("toy:Line", talk, horizon=4)
    assert [r.observation for r in got[1]] == ["at 1"] * 6 and got[3][0].info["valid"] is False
    both("countdown", lambda pool: [start(pool), pool.ask(TASKS, "expert"), pool.ask([2], "evidence")])


@pytest.mark.parametrize("fault", ["exception", "exit", "observation", "nan", "four", "info"])
def test_an_error_ends_its_own_episode_and_says_what_a_worker_says(fault: str) -> None:
    def talk(pool: Any) -> Any:
        found = [
            start(pool),
            ask(pool, Step("R")),
            ask(pool, Step("R")),
            ask(pool, Step("R")),
            ask(pool, Ask("evidence")),
        ]
        return [*found, ask(pool, Snapshot()), start(pool)]

    got = both("toy:Line", talk, fault=fault, fault_tasks=[2])
    assert [bool(result.error) for result in got[2]] == [slot == 2 for slot in TASKS]
    assert [r.observation for r in got[2] if not r.error] == ["at 2"] * 5
    assert got[3][2].error == got[2][2].error, "it stays broken until Reset"
    assert got[4][2] == {} and got[5][2] == -1
    assert not any(result.error for result in got[6])


def test_a_failing_reset_is_an_error_of_its_task_only() -> None:
    got = both("toy:Line", start, fault="reset", fault_tasks=[3])
    assert [bool(result.error) for result in got] == [slot == 3 for slot in TASKS]
    assert re.match(r"RuntimeError: no such map \(toy.py:\d+ in reset\)", got[3].error)


@pytest.mark.parametrize("name", ["toy:Line", "toy:Copied"])
def test_restore_gives_the_same_future_with_and_without_snapshots_of_the_environment(name: str) -> None:
    def talk(pool: Any) -> Any:
        start(pool)
        ask(pool, Step("R"))
        handles = ask(pool, Snapshot())
        future = ask(pool, Step("R"))
        assert ask(pool, *(Restore(h) for h in handles)) == [None] * 6
        assert ask(pool, Step("R")) == future
        ask(pool, *(Restore(h) for h in handles))
        later = ask(pool, Snapshot())  # of a restored state: what was played before the Restore is forgotten
        ask(pool, Step("L"))
        ask(pool, *(Restore(h) for h in later))
        assert ask(pool, Step("R")) == future
        swapped = [handles[1], handles[0], *handles[2:]]  # another slot's: its task comes with it
        ask(pool, *(Restore(h) for h in swapped))
        there = ask(pool, Step("RR"))
        pool.submit(0, Reset("train", 0))
        pool.collect([0])
        pool.submit(0, Restore(handles[0]))
        pool.collect([0])
        pool.submit(0, Step("R"))
        return handles, future, there, pool.ask([1], "evidence"), pool.collect([0])

    *_, (gone,) = both(name, talk)
    assert "does not exist: it ends with the next Reset of its slot" in gone.error


def test_requests_and_environments_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Inline("toy:Line") as pool:
        with pytest.raises(TypeError, match="not a request"):
            pool.submit(0, "R")
        with pytest.raises(ValueError, match="slot 0 has no request in flight"):
            pool.collect([0])
        pool.submit(0, Step("R"))
        assert "not reset" in pool.collect([0])[0].error
        pool.submit(0, Reset("train", 1))
        pool.submit(0, Reset("train", 2))  # the first is abandoned
        assert pool.collect([0])[0].info["goal"] == "goal 3"
        pool.submit(0, Step("R"))  # abandoned, and executed all the same, as a worker would
        pool.submit(0, Step("R"))
        assert pool.collect([0])[0].observation == "at 2"
    with pytest.raises(UserError, match="did you mean 'countdown'"):
        Inline("countdwn")
    with pytest.raises(UserError, match="has no setting 'horizn'"):
        Inline("toy:Line", {"horizn": 3})
    with pytest.raises(UserError, match=r"'toy:Line' cannot be made: RuntimeError: no licence"):
        monkeypatch.setattr("toy.Line.__init__", _refuse)
        Inline("toy:Line")


def _refuse(self: Any) -> None:
    raise RuntimeError("no licence")


def test_environments_are_closed_with_the_pool_even_where_closing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import toy

    closed = []

    def close(self: Any) -> None:
        closed.append(self)
        raise RuntimeError("cannot be closed")

    monkeypatch.setattr(toy.Line, "close", close)
    with Inline("toy:Line") as pool:
        start(pool)
    assert len({id(env) for env in closed}) == 6


def test_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    bench = build(resolve({**RUN, "runtime": {"workers": 0}}, "x"))
    assert isinstance(bench.pool, Inline)
    bench.close()


def test_a_run_gives_the_same_bits_with_0_and_1_workers(tmp_path: Path) -> None:
    bits = []
    for workers in (0, 1):
        out = tmp_path / str(workers)
        train({**RUN, "runtime": {"workers": workers}, "out": str(out)})
        traces = sorted(p.relative_to(out) for p in out.rglob("*.parquet"))
        files = ["policy/model.safetensors", "metrics.jsonl", *traces]
        bits.append({str(f): (out / f).read_bytes() for f in files})
    assert len(bits[0]) > 2, "no trace was compared"
    assert bits[0] == bits[1]
