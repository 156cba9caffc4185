"""What the tests of the command line share."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL_RUN = (
    "--env babyai/GoToRedBallNoDists --steps 2 --tasks-per-step 2 --rollouts-per-task 2 --max-turn-tokens 2 "
    "--evaluation.tasks 3 --evaluation.no-greedy --runtime.checkpoint-every 1"
)
SMALL = SMALL_RUN.split()


def only_json(text: str) -> dict:
    """Standard output as one JSON value and nothing else."""
    assert text.count("\n") == 1 and text.endswith("\n")
    return json.loads(text)
