"""Workers: real processes, real crashes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.envs.workers import Ask, Pool
from assay.protocols import Reset, Restore, Snapshot, Step, StepResult, UserError

sys.path.insert(0, str(Path(__file__).parent))  # "toy:Line" for the workers, who get this path

TASKS = range(6)


def start(pool: Pool) -> list[StepResult]:
    for slot in TASKS:
        pool.submit(slot, Reset("train", slot))
    return pool.collect(TASKS)


def step(pool: Pool, action: str) -> list[StepResult]:
    for slot in TASKS:
        pool.submit(slot, Step(action))
    return pool.collect(TASKS)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within 20 s"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_lockstep_equals_direct_calls() -> None:
    from toy import Line

    with Pool("toy:Line", {"horizon": 4}, workers=2) as pool:
        assert pool.spec["version"] == "line-1" and pool.spec["powers"] == ["expert", "evidence"]
        got = [start(pool), *(step(pool, action) for action in ("R", "Lx", "?", "S"))]
        assert pool.counters == {"errors": 0, "timeouts": 0, "restarts": 0, "stray_lines": 0}
    for slot in TASKS:
        env = Line(horizon=4)
        observation, info = env.reset(options={"task": slot, "split": "train"})
        assert got[0][slot] == StepResult(observation, 0.0, False, False, info)
        for turn, action in enumerate(("R", "Lx", "?", "S")):
            observation, reward, terminated, truncated, info = env.step(action)
            assert got[turn + 1][slot] == StepResult(observation, reward, terminated, truncated, info)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("exception", r"ValueError: a wall is missing \(toy.py:\d+ in _fail\)"),
        ("exit", "SystemExit: 3"),
        ("observation", "malformed: step returned observation of type int, not str"),
        ("nan", "malformed: step returned reward nan, not a finite number"),
        ("four", r"malformed: step returned 4 values, not \(observation, reward, terminated, truncated, info\)"),
        ("info", "malformed: a value of type object in info or evidence is not JSON"),
    ],
)
def test_an_environment_error_names_its_cause_and_touches_no_other_slot(fault: str, says: str) -> None:
    with Pool("toy:Line", {"fault": fault, "fault_tasks": [2]}) as pool:
        start(pool)
        step(pool, "R")
        results = step(pool, "R")
        assert [bool(result.error) for result in results] == [slot == 2 for slot in TASKS]
        assert re.match(says, results[2].error), results[2].error
        assert [r.observation for r in results if not r.error] == ["at 2"] * 5
        assert step(pool, "R")[2].error == results[2].error  # it stays broken until Reset
        assert pool.counters["errors"] == 1 and pool.counters["restarts"] == 0
        assert not any(result.error for result in start(pool))


@pytest.mark.parametrize(("fault", "says"), [("crash", "exited with 7"), ("hang", "no answer within 1 s")])
def test_a_crash_or_hang_ends_one_episode_and_the_others_go_on_in_a_new_worker(fault: str, says: str) -> None:
    with Pool("toy:Line", {"fault": fault, "fault_tasks": [2]}, timeout_s=1.0) as pool:
        first = pool.pids
        start(pool)
        step(pool, "R")
        results = step(pool, "R")
        assert says in results[2].error and "step of slot 2" in results[2].error
        assert [r.observation for slot, r in enumerate(results) if slot != 2] == ["at 2"] * 5
        assert pool.counters["restarts"] == 1 and pool.counters["errors"] == 1
        assert pool.counters["timeouts"] == (fault == "hang")
        assert pool.pids != first and not running(first[0])
        assert [r.observation for slot, r in enumerate(step(pool, "L")) if slot != 2] == ["at 1"] * 5


def test_a_worker_killed_between_steps_is_blamed_on_nobody() -> None:
    with Pool("toy:Line", workers=2) as pool:
        start(pool)
        step(pool, "R")
        os.kill(pool.pids[1], signal.SIGKILL)
        wait_for(lambda: not running(pool.pids[1]), "the kill")
        assert [r.observation for r in step(pool, "R")] == ["at 2"] * 6
        assert pool.counters["restarts"] == 1 and pool.counters["errors"] == 0


def test_an_episode_that_replays_differently_is_an_error() -> None:
    with Pool("toy:Forgetful") as pool:
        start(pool)
        os.kill(pool.pids[0], signal.SIGKILL)
        results = step(pool, "R")
        assert all("the observation of turn 0 is not what it was" in result.error for result in results)
        assert pool.counters["errors"] == 6


def test_a_replay_that_crashes_again_ends_only_its_own_episode() -> None:
    with Pool("toy:Line", {"fault": "crash", "fault_turn": 0, "fault_tasks": [1, 4]}) as pool:
        start(pool)
        results = step(pool, "R")
        assert [slot for slot in TASKS if results[slot].error] == [1, 4]
        assert pool.counters["restarts"] == 2


@pytest.mark.parametrize("name", ["toy:Line", "toy:Copied"])
def test_restore_gives_the_same_future_with_and_without_snapshots_of_the_environment(name: str) -> None:
    with Pool(name) as pool:
        start(pool)
        step(pool, "R")
        for slot in TASKS:
            pool.submit(slot, Snapshot())
        handles = pool.collect(TASKS)
        assert len(set(handles)) == 6
        once = [step(pool, "L"), step(pool, "S")]
        for again in range(2):
            if again:
                os.kill(pool.pids[0], signal.SIGKILL)  # the snapshots die, the logs do not
            for slot, handle in zip(TASKS, handles, strict=True):
                pool.submit(slot, Restore(handle))
            assert pool.collect(TASKS) == [None] * 6
            assert [step(pool, "L"), step(pool, "S")] == once
        start(pool)
        pool.submit(0, Restore(handles[0]))
        pool.submit(1, Step("R"))
        assert pool.collect([0, 1])[0] is None
        pool.submit(0, Step("R"))
        assert "does not exist" in pool.collect([0])[0].error


def test_expert_and_evidence_are_those_of_the_state() -> None:
    with Pool("toy:Line") as pool:
        start(pool)
        for _ in range(3):
            for slot, action in zip(TASKS, pool.ask(TASKS, "expert"), strict=True):
                pool.submit(slot, Step(action))
            pool.collect(TASKS)
        assert [e["checks"][0]["value"] for e in pool.ask(TASKS, "evidence")] == [1, 2, 3, 1, 2, 3]


def test_prints_never_reach_our_output_and_are_counted(capfd: Any) -> None:
    with Pool("toy:Line", {"fault": "print", "fault_tasks": [0, 3]}) as pool:
        start(pool)
        step(pool, "R")
        assert [r.observation for r in step(pool, "R")] == ["at 2"] * 6
        assert pool.counters["stray_lines"] == 6
        assert sorted(pool.stray) == sorted(["stray one", "stray two", "stray three"] * 2)
    assert capfd.readouterr() == ("", "")


def test_observations_larger_than_a_pipe_cross_it() -> None:
    with Pool("toy:Line") as pool:
        start(pool)
        assert all(result.info["skill"] == "other" for result in step(pool, "x" * 300_000))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [("toy:Missing", {}, "has no 'Missing'"), ("toy:Line", {"horizn": 3}, "horizn"), ("nowhere:Env", {}, "nowhere")],
)
def test_an_environment_that_cannot_be_made_is_the_users_error(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Pool(name, settings)


def test_asking_for_an_episode_that_was_never_started_is_an_error_not_a_crash() -> None:
    with Pool("toy:Line") as pool:
        pool.submit(0, Step("R"))
        pool.submit(1, Ask("expert"))
        step_result, expert = pool.collect([0, 1])
        assert "not reset" in step_result.error and expert == ""


@pytest.mark.parametrize("fault", ["", "hang"])
def test_workers_die_with_a_parent_killed_by_signal_9(fault: str) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from assay.envs.workers import Pool
from assay.protocols import Reset, Step
pool = Pool("toy:Line", {{"fault": {fault!r}, "fault_turn": 0, "fault_tasks": [0]}}, workers=2)
pool.submit(0, Reset("train", 0)); pool.collect([0])
pool.submit(0, Step("R")); pool.flush()
print(*pool.pids, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(running(pid) for pid in pids), "the end of the workers")
    parent.stdin.close()
    parent.stdout.close()


def test_close_leaves_no_process() -> None:
    pool = Pool("toy:Line", workers=2)
    pids = pool.pids
    pool.close()
    assert not any(running(pid) for pid in pids)
