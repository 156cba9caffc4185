"""BabyAI in text: Farama minigrid's one-room levels, in the manner of BabyAI-Text (GLAM, arXiv 2302.02662).

The goal is the mission, an observation is what the 7 x 7 view ahead of the agent shows, in as few words as acting takes:

    red ball 2 left 1 forward, grey key ahead, wall left, carrying blue box

Objects come nearest first, then walls, then what is carried. "ahead", "left" and "right" without a number mean the cell
next to the agent. One word is one action. Left out: levels of many rooms, and minigrid's step discount of the reward,
because success is the fact and what a method makes of its length is the method's business.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from minigrid.core.constants import COLOR_NAMES, DIR_TO_VEC
from minigrid.core.world_object import WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import ObjDesc, PickupInstr, PutNextInstr
from minigrid.envs.babyai.goto import GoToLocal, GoToObj, GoToRedBall
from minigrid.envs.babyai.pickup import PickupLoc
from minigrid.envs.babyai.putnext import PutNextLocal
from minigrid.utils.baby_ai_bot import BabyAIBot, DropSubgoal, GoNextToSubgoal

from assay.envs.base import TRIES, TextEnv, bucket, candidate_seed
from assay.protocols import SPLITS, UserError
from assay.rng import stable_hash

REVISION = "2"  # raise when a task, an observation or a reward changes with unchanged settings
WORDS = ("left", "right", "forward", "pickup", "drop", "toggle")  # minigrid's actions 0 to 5
VIEW = 7  # cells ahead and across, the agent in the middle of the nearest row
UNLIMITED = 2**31  # our horizon ends episodes, not minigrid's

Pair = tuple[str, str]  # (type, colour)
# Never in "train" or "iid". Each colour once, each type twice: every word is trained, these combinations never are.
RESERVED: frozenset[Pair] = frozenset(
    [("ball", "purple"), ("ball", "blue"), ("box", "yellow"), ("box", "grey"), ("key", "green"), ("key", "red")]
)
PAIRS: tuple[Pair, ...] = tuple((kind, color) for kind in ("ball", "box", "key") for color in COLOR_NAMES)
TRAINED: tuple[Pair, ...] = tuple(pair for pair in PAIRS if pair not in RESERVED)


@dataclass(frozen=True, slots=True)
class Level:
    """A level of minigrid: its class, the attribute that counts its objects ("" if fixed), and our defaults."""

    make: Callable[..., RoomGridLevel]
    count: str
    objects: int  # half of minigrid's number where that is 7 or 8, for half of the words
    fewest: int
    horizon: int  # turns in a room of 8: above the 99th percentile of an expert with 10 % of random actions


LEVELS: dict[str, Level] = {
    "GoToRedBallNoDists": Level(GoToRedBall, "num_dists", 0, 0, 24),
    "GoToRedBall": Level(GoToRedBall, "num_dists", 4, 0, 24),
    "GoToObj": Level(GoToObj, "", 1, 1, 24),
    "GoToLocal": Level(GoToLocal, "num_dists", 4, 1, 24),
    "PickupLoc": Level(PickupLoc, "num_dists", 4, 1, 32),
    "PutNextLocal": Level(PutNextLocal, "num_objs", 4, 2, 40),
}


class BabyAI(TextEnv):
    """One level.

    room      side of the room, walls included
    ood_room  that of the split "ood" (default: 2 more)
    objects   how many (default: LEVELS; 7 or 8 give minigrid's own levels), beside the red ball in its two levels
    horizon   turn limit of a task (default: LEVELS, in proportion to the room's side)

    Raises UserError for settings that minigrid could only answer by searching for ever.
    """

    skills = WORDS
    instructions = (
        "You stand in a room of square cells and see what lies ahead of you. Positions are steps from you: "
        "'red ball 2 left 1 forward'. 'ahead', 'left' and 'right' alone mean the cell next to you. "
        "Answer with one word: left or right (turn on the spot), forward (one step), pickup (the object ahead), "
        "drop (what you carry, on the free cell ahead), toggle (open or close what is ahead). "
        "To go to an object means to stand next to it, facing it."
    )
    brief = "one move"

    def __init__(
        self,
        level: str = "GoToLocal",
        room: int = 8,
        ood_room: int | None = None,
        objects: int | None = None,
        horizon: int | None = None,
    ) -> None:
        super().__init__(observation_length=2048, action_length=64)
        if level not in LEVELS:
            raise UserError(f"BabyAI level {level!r} does not exist: the levels are {', '.join(LEVELS)}")
        self.level, self.kind = level, LEVELS[level]
        self.objects = self.kind.objects if objects is None else objects
        rooms = {"train": room, "iid": room, "ood": room + 2 if ood_room is None else ood_room}
        for side in rooms.values():
            _check_settings(self.level, side, self.objects)
        self.rooms = rooms
        if level == "PickupLoc":
            self.instructions += (
                " 'On your left' or 'behind you' in the task mean where you stand and face at the start."
            )
        if horizon is not None and horizon < 1:
            raise UserError(f"horizon {horizon} of BabyAI {level}: an episode has at least one turn")
        self.limits = {split: horizon or self.kind.horizon * side // 8 for split, side in rooms.items()}
        settings = (REVISION, level, *rooms.values(), self.objects, *self.limits.values())
        self.version = stable_hash("babyai " + " ".join(map(str, settings)))[:8]
        self.worlds = {split: self._world(rooms[split], PAIRS if split == "ood" else TRAINED) for split in SPLITS}
        self.over = True

    def _world(self, room: int, pool: Sequence[Pair]) -> Any:
        world: Any = self.kind.make(room_size=room, max_steps=UNLIMITED)
        if self.kind.count:
            setattr(world, self.kind.count, self.objects)
        world.add_distractors = partial(_scatter, world, pool)
        world.gen_obs = dict  # minigrid's own picture of the view, which nobody looks at, is most of a step's time
        return world

    # ------------------------------------------------------------------------------------------------- episode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split, task = self.pick(seed, options)
        for attempt in range(TRIES):
            candidate = candidate_seed(f"babyai/{self.level}", split, task, attempt)
            self._build(split, candidate)
            content = _content(self.world)
            if _novel(self.world) if split == "ood" else bucket(content) == split:
                break
        else:
            raise RuntimeError(f"no layout of babyai/{self.level} for {split} {task} among {TRIES} seeds")
        text = self._look()
        info = {"hash": content, "goal": self.world.mission, "horizon": self.horizon, "admissible": list(WORDS)}
        return text, info | {"anchor": self.anchor(text)}

    @property
    def horizon(self) -> int:
        return self.limits[self.split]

    def _build(self, split: str, seed: int) -> None:
        """Start of the episode that (split, seed) gives: what minigrid's reset does, without its picture."""
        self.split, self.seed_of_task = split, seed
        self.history: list[str] = []  # executed words, "" for an invalid action
        self.seen: set[tuple[int, int]] = set()
        self.over = False
        self.world = world = self.worlds[split]
        world.np_random = np.random.default_rng(seed)
        world.agent_pos, world.agent_dir, world.carrying, world.step_count = (-1, -1), -1, None, 0
        with redirect_stdout(io.StringIO()):  # minigrid prints "Sampling rejected"
            world._gen_grid(world.width, world.height)
        world.instrs.reset_verifier(world)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.over:
            raise UserError("the BabyAI episode is over: call reset before step")
        word = action.strip().rstrip(".").lower()
        valid = word in WORDS
        success, noop = self._execute(word if valid else "")
        text = self._look()
        truncated = not success and len(self.history) >= self.horizon
        self.over = success or truncated
        info = {
            "valid": valid,
            "success": success,
            "anchor": self.anchor(text),
            "skill": word if valid else "other",
            "noop": noop,
            "admissible": list(WORDS),
        }
        return text, float(success), success, truncated, info

    def _execute(self, word: str) -> tuple[bool, bool]:
        """(success, noop) of one word, "" for an invalid one."""
        self.history.append(word)
        if not word:
            return False, True
        before = _state(self.world)
        _, reward, terminated, _, _ = self.world.step(WORDS.index(word))
        return bool(terminated and reward > 0), _state(self.world) == before

    def _look(self) -> str:
        cells = visible(self.world)
        self.seen.update((x, y) for _, _, x, y, _ in cells)
        return describe(cells, self.world.carrying)

    # -------------------------------------------------------------------------------------------------- powers

    def expert(self) -> str:
        """The package's BabyAIBot, planning anew from the present state and all that was seen so far in the episode."""
        return _plan(self.world, self.seen)

    def snapshot(self) -> dict[str, Any]:
        """An episode is its layout and its actions, so that is the state: JSON, to be replayed."""
        return {
            "version": self.version,
            "split": self.split,
            "seed": self.seed_of_task,
            "history": tuple(self.history),
            "over": self.over,
            "random": self.np_random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["version"] != self.version:
            raise UserError(f"the snapshot is of BabyAI {state['version']}, this is {self.version}: use equal settings")
        self._build(state["split"], state["seed"])
        self._look()
        for word in state["history"]:
            self._execute(word)
            self._look()
        self.over = state["over"]
        self.np_random.bit_generator.state = state["random"]

    def evidence(self) -> dict[str, Any]:
        """How far the mission got, part by part; `gold` is the expert's plan from the first observation on.

        A plan of one or two words is left out: any prompt that says which actions there are contains it.
        """
        plan = self._solution()
        return {"checks": _checks(self.world), "gold": [" ".join(plan)] if len(plan) > 2 else []}

    def _solution(self) -> list[str]:
        now = self.snapshot()
        self.restore({**now, "history": (), "over": False})
        words: list[str] = []
        while not self.over:
            words.append(self.expert())
            self.step(words[-1])
        self.restore(now)
        return words


# ------------------------------------------------------------------------------------------------------------ text


Cell = tuple[int, int, int, int, Any]  # steps forward, steps right (negative: left), x, y, what is there


def visible(world: Any) -> list[Cell]:
    """The cells that minigrid's view shows (`Grid.process_vis` on `gen_obs_grid`), read from the grid in place.

    Light enters a row from the agent's side and spreads sideways and one row ahead, through what can be seen through.
    """
    (dx, dy), (ax, ay) = DIR_TO_VEC[world.agent_dir], world.agent_pos
    dx, dy, ax, ay, half = int(dx), int(dy), int(ax), int(ay), VIEW // 2
    grid, width, height = world.grid.grid, world.grid.width, world.grid.height
    cells: list[Cell] = []
    lit = [False] * VIEW
    lit[half] = True
    for forward in range(VIEW):
        xs = [ax + forward * dx - (i - half) * dy for i in range(VIEW)]
        ys = [ay + forward * dy + (i - half) * dx for i in range(VIEW)]
        inside = [0 <= x < width and 0 <= y < height for x, y in zip(xs, ys, strict=True)]
        row = [grid[y * width + x] if ok else None for x, y, ok in zip(xs, ys, inside, strict=True)]
        clear = [ok and (cell is None or cell.see_behind()) for cell, ok in zip(row, inside, strict=True)]
        ahead = [False] * VIEW
        for i in range(VIEW - 1):
            if lit[i] and clear[i]:
                lit[i + 1] = ahead[i] = ahead[i + 1] = True
        for i in range(VIEW - 1, 0, -1):
            if lit[i] and clear[i]:
                lit[i - 1] = ahead[i] = ahead[i - 1] = True
        cells += [(forward, i - half, xs[i], ys[i], row[i]) for i in range(VIEW) if lit[i] and inside[i]]
        lit = ahead
    return cells


def describe(cells: Sequence[Cell], carrying: WorldObj | None) -> str:
    """Objects nearest first, the wall straight ahead, walls next to the agent, the object carried.

    An empty view is "wall forward": somewhere ahead. The word "nothing" would occur in "ood" only, never trained, because
    a room of 8 ends within the view.
    """
    things = [
        (forward + abs(right), abs(right), right, forward, cell)
        for forward, right, _, _, cell in cells
        if cell is not None and cell.type != "wall" and (forward or right)
    ]
    parts = [f"{_name(cell)} {_where(forward, right)}" for _, _, right, forward, cell in sorted(things, key=_rank)]
    walls = {(forward, right) for forward, right, _, _, cell in cells if cell is not None and cell.type == "wall"}
    ahead = min((forward for forward, right in walls if right == 0), default=0)
    parts += [f"wall {_where(ahead, 0)}"] if ahead else []
    parts += [f"wall {_where(0, side)}" for side in (-1, 1) if (0, side) in walls]
    parts += [f"carrying {_name(carrying)}"] if carrying is not None else []
    return ", ".join(parts) or "wall forward"


def _rank(thing: tuple[int, int, int, int, Any]) -> tuple[int, int, int]:
    return thing[:3]


def _name(cell: Any) -> str:
    if cell.type != "door":
        return f"{cell.color} {cell.type}"
    return f"{'open' if cell.is_open else 'locked' if cell.is_locked else 'closed'} {cell.color} door"


def _where(forward: int, right: int) -> str:
    if (forward, abs(right)) in ((1, 0), (0, 1)):
        return "ahead" if forward else "left" if right < 0 else "right"
    side = f"{abs(right)} {'left' if right < 0 else 'right'}" if right else ""
    return f"{side} {forward} forward".strip() if forward else side


# ---------------------------------------------------------------------------------------------------------- layout


def _check_settings(level: str, room: int, objects: int) -> None:
    spec, most = LEVELS[level], (room - 2) ** 2 // 3  # denser rooms can hold an object that none can reach
    if not 5 <= room <= 32:
        raise UserError(f"room {room} of BabyAI {level}: a side has 5 to 32 cells, walls included")
    if level == "PutNextLocal":
        most = min(most, len(TRAINED))  # its objects all differ
    if not spec.count and objects != spec.objects:
        raise UserError(f"objects {objects} of BabyAI {level}: this level always has {spec.objects}")
    if not spec.fewest <= objects <= most:
        raise UserError(f"objects {objects} of BabyAI {level}: a room of {room} holds {spec.fewest} to {most}")


def _scatter(
    world: Any, pool: Sequence[Pair], i: int = 0, j: int = 0, num_distractors: int = 10, all_unique: bool = True
) -> list[WorldObj]:
    """minigrid's `add_distractors`, drawing from the pool: cheaper than rejecting layouts by what they contain."""
    present = {(thing.type, thing.color) for thing in world.get_room(i, j).objs}
    things: list[WorldObj] = []
    while len(things) < num_distractors:
        pair = pool[world._rand_int(0, len(pool))]
        if all_unique and pair in present:
            continue
        present.add(pair)
        things.append(world.add_object(i, j, *pair)[0])
    return things


def _things(world: Any) -> list[tuple[int, str, str]]:
    return [(k, c.type, c.color) for k, c in enumerate(world.grid.grid) if c is not None and c.type != "wall"]


def _content(world: Any) -> str:
    pose = [int(world.agent_pos[0]), int(world.agent_pos[1]), int(world.agent_dir)]
    return stable_hash(repr((world.width, world.height, pose, _things(world), world.mission)))


def _target(world: Any) -> ObjDesc:
    instr = world.instrs
    return instr.desc_move if isinstance(instr, PutNextInstr) else instr.desc


def _novel(world: Any) -> bool:
    """Is the mission about objects of reserved pairs only; if it is about the red ball, is any of them in the room?"""
    if isinstance(world, GoToRedBall):
        return world.num_dists == 0 or any(thing[1:] in RESERVED for thing in _things(world))
    return all((thing.type, thing.color) in RESERVED for thing in _target(world).obj_set)


def _state(world: Any) -> tuple[Any, ...]:
    """All that one action can change."""
    x, y = (int(v) for v in world.agent_pos)
    cell = world.grid.get(*world.front_pos)
    return x, y, int(world.agent_dir), id(world.carrying), id(cell), getattr(cell, "is_open", None)


# ----------------------------------------------------------------------------------------------- expert, evidence


def _plan(world: Any, seen: set[tuple[int, int]]) -> str:
    """The bot keeps a plan and mends it by the actions it is told; a new bot needs only the state, whatever was done.

    Its plans start with empty hands, hence the two corrections. Where it gives up (an object of the mission is gone),
    the answer is a turn.
    """
    bot = BabyAIBot(world)
    for x, y in seen:
        bot.vis_mask[x, y] = True
    held, instr = world.carrying, world.instrs
    if isinstance(instr, PutNextInstr) and any(held is thing for thing in instr.desc_move.obj_set):
        del bot.stack[2:]  # it stands as: drop, go next to the fixed one, pick up, go to the moved one
    elif held is not None and isinstance(instr, PickupInstr | PutNextInstr):
        place = bot._find_drop_pos()
        if place is not None:
            bot.stack += [DropSubgoal(bot), GoNextToSubgoal(bot, place)]
    try:
        action = int(bot.replan())
    except AssertionError:
        return "left"
    return WORDS[action] if action < len(WORDS) else "left"


def _checks(world: Any) -> list[dict[str, Any]]:
    instr, target = world.instrs, _target(world)
    front = tuple(int(v) for v in world.front_pos)
    held = any(world.carrying is thing for thing in target.obj_set)
    # Not from `target.obj_poss`: minigrid brings that up to date when something is dropped, not when it is picked up.
    cells = [k for k, cell in enumerate(world.grid.grid) if any(cell is thing for thing in target.obj_set)]
    places = [(k % world.width, k // world.width) for k in cells]
    distance = min((abs(x - front[0]) + abs(y - front[1]) for x, y in places), default=-1)

    def check(name: str, passed: bool, value: int) -> dict[str, Any]:
        return {"name": name, "passed": passed, "where": f"x {front[0]} y {front[1]}", "value": value}

    checks = [check("target ahead", distance == 0, distance)]
    if isinstance(instr, PickupInstr | PutNextInstr):
        checks.append(check("target carried", held, int(held)))
    if isinstance(instr, PutNextInstr):
        checks.append(check("target put next", not held and bool(instr.objs_next()), int(instr.objs_next())))
    return checks
