"""TextWorld-Cooking: find the ingredients, follow the cookbook, eat the meal. The real `textworld` engine, made fast.

Every reply, the score and the end come from the game itself, run by jericho. Two things are ours: the compact text of
a room (the facts that the engine's prose states, without the prose), and the list of admissible commands (see
`textworld_kitchen.py`). After each command the model's room and score are held against the engine's.
Left out on purpose: the engine's save, restart, undo and transcript commands, which would break a training run.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from assay.envs.base import CHARSET, TextEnv
from assay.envs.textworld_games import Entry, Level, Library
from assay.envs.textworld_kitchen import CUTS, Kitchen, State
from assay.protocols import SPLITS, UserError
from assay.rng import stable_hash

REVISION = 1  # of this file: raised when an observation, a rule or a reward changes
FRYING = {"fried": "fry", "roasted": "roast", "grilled": "grill"}
STATUS = re.compile(r"\n>\s*(?:-= (?P<room>.*?) =-)?(?P<score>-?\d+)/\d+\s*$")
END = re.compile(r"\n\s*\*\*\* (?:The End|You lost!) \*\*\*.*", re.DOTALL)
FINAL = re.compile(r"You scored (?P<score>-?\d+) out of")  # the status line is not drawn again at the end
SCORED = re.compile(r"Your score has just gone (?:up|down) by [\w-]+ points?\.")
RECIPE = re.compile(r"Ingredients:\n(?P<ingredients>.*?)\n\s*\n\s*Directions:\n(?P<directions>.*)", re.DOTALL)
ARTICLES = ("the", "a", "an", "some")
SHORT = {"l": "look", "i": "inventory", "n": "go north", "s": "go south", "e": "go east", "w": "go west"}
REWRITES = tuple(
    (re.compile(pattern), command)
    for pattern, command in (
        (r"^(?:go )?(north|south|east|west)$", r"go \1"),
        (r"^(?:x|read) (.+)$", r"examine \1"),
        (r"^(?:get|grab|pick up) (.+)$", r"take \1"),
        (r"^(?:put|place|insert) (.+) (?:in|into|inside) (.+)$", r"insert \1 into \2"),
        (r"^(?:put|place) (.+) (?:on|onto) (.+)$", r"put \1 on \2"),
        (r"^(cook|chop|slice|dice) (.+) (?:in|on|using) (.+)$", r"\1 \2 with \3"),
    )
)
REFUSED = "That is not a command of this game."
TEXTS = ("compact", "full")


class TextWorldCooking(TextEnv):
    """Settings are those of `tw-make tw-cooking`; `None` for open, cook, cut or drop means half of the games each.

    games: tasks of "train"; "iid" and "ood" have a quarter of that. "ood" has one more ingredient to find.
    text: "compact" (about 9 words a turn) or "full" (the engine's prose without its banner).
    patience: horizon in multiples of the expert's length. cache: folder for the games, see `default_cache`.
    Reward is 1 for the eaten meal, else 0; the engine's score divided by its maximum is info["score"].
    """

    skills: ClassVar[tuple[str, ...]] = (
        *("look", "inventory", "go", "examine", "open", "close", "take", "drop", "insert", "put"),
        *("chop", "slice", "dice", "cook", "prepare", "eat"),
    )
    instructions = (
        "You are in a house and hungry. Read the cookbook, gather the ingredients of its recipe, cut and cook them as it "
        "says unless they already are (fry with the stove, roast with the oven, grill with the BBQ; cut with the knife in "
        "your hand), then prepare meal in the kitchen and eat meal. A wrong cut, a second cooking or an eaten ingredient "
        "loses the game. Answer with one command, such as: look, inventory, go north, examine cookbook, open fridge, "
        "take carrot from fridge, cook carrot with oven, dice carrot with knife, drop knife, prepare meal, eat meal."
    )
    brief = "cook and eat the recipe"

    def __init__(
        self,
        recipe: int = 1,
        take: int = 1,
        go: int = 1,
        open: bool | None = True,
        cook: bool | None = None,
        cut: bool | None = None,
        drop: bool | None = False,
        games: int = 256,
        text: str = "compact",
        patience: float = 2.0,
        cache: str | Path | None = None,
    ) -> None:
        super().__init__()
        if text not in TEXTS:
            raise UserError(f"text={text!r} of textworld-cooking does not exist: choose one of {', '.join(TEXTS)}")
        if games < 4 or patience < 1:
            raise UserError(f"textworld-cooking has games={games}, patience={patience}: at least 4 and 1 are needed")
        levels = [Level(recipe, take, go)]
        for skill, setting in {"open": open, "drop": drop, "cook": cook, "cut": cut}.items():
            choices = (False, True) if setting is None else (setting,)
            levels = [replace(level, **{skill: choice}) for level in levels for choice in choices]
        sizes = {"train": games, "iid": games // 4, "ood": games // 4}
        self.library = Library(levels, sizes, Path(cache) if cache else None)
        self.text = text
        self.patience = patience
        self.version = stable_hash(json.dumps([REVISION, self.library.key, text, patience]))
        self.entry: Entry | None = None
        self._engine = Engine()

    @classmethod
    def prepare(cls, split: str = "", count: int | None = None, jobs: int = 1, **settings: Any) -> list[str]:
        """Make the games of a split (all splits by default) ahead of time; the paths of their story files."""
        library = cls(**settings).library
        splits = (split,) if split else SPLITS
        return [str(library.story_path(entry)) for name in splits for entry in library.prepare(name, count, jobs)]

    def size(self, split: str) -> int:
        return self.library.sizes[split]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split, task = self.pick(seed, options)
        if (options or {}).get("task") is None:
            task %= self.size(split)
        entry = self.library.entry(split, task)
        self._open(entry)
        kitchen = self.kitchen
        self.state: State = kitchen.start
        self.horizon = math.ceil(self.patience * len(kitchen.plan(kitchen.start)))
        self.turn, self.score, self.won, self.over = 0, 0, False, False
        observation = self._shown("look", self._engine.send("look")[0] if self.text == "full" else "")
        goal = "Cook the recipe of the cookbook and eat the meal."
        return observation, {"hash": entry.hash, "goal": goal, **self._info(observation, True, "look", False)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.entry is None or self.over:
            raise UserError("step of textworld-cooking was called where no episode is running: call reset first")
        self.turn += 1
        before, command = self.state, resolve(action, self.kitchen.admissible(self.state))
        if command:
            reply, ending = self._engine.send(command)
            self.state = self.kitchen.after(before, command)
            self.won, self.over = ending == "won", ending != ""
            self._compare(reply, command)
            observation = self._shown(command, reply)
        else:
            observation = self._refusal(action)
        terminated = self.over
        truncated = not terminated and self.turn >= self.horizon
        self.over = terminated or truncated
        verb = (command or action.strip().lower() or "?").split()[0]
        info = self._info(observation, bool(command), verb, self.state == before)
        return observation, float(self.won), terminated, truncated, info

    def expert(self) -> str:
        """The next command of `Kitchen.expert`: it wins from every state in which the game is not over, time allowing."""
        return self.kitchen.expert(self.state)

    def snapshot(self) -> Any:
        state = (self.state, self.turn, self.horizon, self.score, self.won, self.over)
        return self.entry, self._engine.state(), state

    def restore(self, state: Any) -> None:
        entry, engine, rest = state
        self._open(entry)
        self._engine.load_state(engine)
        self.state, self.turn, self.horizon, self.score, self.won, self.over = rest

    def evidence(self) -> dict[str, Any]:
        """One check for each step of the recipe that scores, in the cookbook's order, and the engine's score."""
        kitchen, done = self.kitchen, self.state.done
        order = [*(food for food, _, _ in kitchen.recipe), "meal"]
        verbs = ("take", "cut", "cook", "prepare", "eat")
        steps = sorted(kitchen.todo, key=lambda step: (order.index(step[1]), verbs.index(step[0])))
        checks = [
            {
                "name": f"{verb} {thing}",
                "passed": (verb, thing) in done,
                "where": thing,
                "value": float((verb, thing) in done),
            }
            for verb, thing in steps
        ]
        value = self.score / self.record["max_score"]
        checks.append({"name": "score", "passed": self.won, "where": "engine", "value": value})
        return {"checks": checks, "gold": [self.recipe(), *self.directions()]}

    def directions(self) -> list[str]:
        """What the cookbook tells to do with the ingredients: "dice the carrot"."""
        return [
            f"{verb} the {food}"
            for food, cooking, cutting in self.kitchen.recipe
            for verb in (CUTS.get(cutting), FRYING.get(cooking))
            if verb
        ]

    def recipe(self) -> str:
        return _recipe(", ".join(food for food, _, _ in self.kitchen.recipe), [*self.directions(), "prepare meal"])

    def close(self) -> None:
        self._engine.close()

    def _open(self, entry: Entry) -> None:
        if self.entry != entry:
            self.record = self.library.record(entry)
            self.kitchen = Kitchen.parse(self.record)
        self._engine.load(self.library.story_path(entry))
        self.entry = entry

    def _info(self, observation: str, valid: bool, verb: str, noop: bool) -> dict[str, Any]:
        return {
            "valid": valid,
            "success": self.won,
            "anchor": self.anchor(observation),
            "skill": verb if verb in self.skills else "other",
            "noop": noop,
            "admissible": [] if self.over else self.kitchen.admissible(self.state),
            "horizon": self.horizon,
            "score": self.score / self.record["max_score"],
        }

    def _compare(self, reply: str, command: str) -> None:
        """The engine has the last word: a model that lost it would show wrong commands, so the episode must not go on."""
        status = STATUS.search(reply)
        if status is None:
            raise RuntimeError(f"the game {self.entry} answered {command!r} without its status line: {reply[-200:]!r}")
        self.score = int((FINAL.search(reply) or status)["score"])
        expected = len(self.state.done & self.kitchen.todo)
        if (status["room"] or "").lower() != self.state.room.lower() or self.score != expected:
            raise RuntimeError(
                f"after {command!r} the game {self.entry} is at {status['room']!r} with score {self.score}, "
                f"its model at {self.state.room!r} with {expected}"
            )

    def _refusal(self, action: str) -> str:
        """What the engine says to a command that it refuses; the engine is put back, so that nothing changes."""
        text = " ".join(action.lower().split())
        if self.over or not re.fullmatch(r"[a-z' ]{1,80}", text) or text.split()[0] not in self.skills:
            return REFUSED
        state = self._engine.state()
        self._engine.send("tw-trace-actions")
        reply, ending = self._engine.send(text)
        self._engine.load_state(state)
        return REFUSED if ending or "- succeeded]" in reply else _plain(re.sub(r"\[[^]]+\]", "", reply))

    def _shown(self, command: str, reply: str) -> str:
        """The observation after a command that the engine accepted."""
        if self.text == "full":
            return "".join(c for c in END.sub("", STATUS.sub("", reply)).strip() if c in CHARSET)
        if command == "look" or command.startswith("go "):
            return self.room()
        if match := RECIPE.search(STATUS.sub("", reply)):
            directions = [line.strip() for line in match["directions"].splitlines() if line.strip()]
            return _recipe(", ".join(line.strip() for line in match["ingredients"].splitlines()), directions)
        return _plain(reply)

    def room(self) -> str:
        """What the engine's description of a room states: furniture and its contents, things on the floor, exits."""
        kitchen, state = self.kitchen, self.state
        seen = [self._furniture(thing) for thing in kitchen.furniture[state.room]]
        if floor := kitchen.inside(state, state.room):
            seen.append(f"floor ({self._listed(floor)})")
        exits = [
            f"{direction} ({'open' if door in state.opened else 'closed'} {door})" if door else direction
            for direction, (_, door) in kitchen.exits[state.room].items()
        ]
        text = f"{state.room}: {', '.join(seen) or 'nothing'}."
        return f"{text} exits: {', '.join(exits)}." if exits else text

    def _furniture(self, thing: str) -> str:
        kitchen, state = self.kitchen, self.state
        contents = self._listed(kitchen.inside(state, thing))
        if thing not in kitchen.openable:
            return f"{thing} ({contents})" if contents else thing
        if thing not in state.opened:
            return f"closed {thing}"
        return f"open {thing} ({contents or 'empty'})"

    def _listed(self, things: list[str]) -> str:
        foods = self.state.foods
        return ", ".join(foods[thing].described(thing) if thing in foods else thing for thing in things)


class Engine:
    """The Z-machine of one game at a time. Loading a game that is already loaded only sets its memory back."""

    def __init__(self) -> None:
        self._frotz: Any = None
        self._story: Path | None = None
        self._start: Any = None

    def load(self, story: Path) -> None:
        if story == self._story:
            self._frotz.set_state(self._start)
            return
        import jericho

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)  # "score is not read": we read it
            if self._frotz is None:
                self._frotz = jericho.FrotzEnv(str(story), seed=0)
            else:
                self._frotz.close()
                self._frotz._cache.clear()  # it keeps every story it has ever read, half a megabyte each
                self._frotz.load(str(story), seed=0)
        self._story, self._start = story, self._frotz.get_state()

    def send(self, command: str) -> tuple[str, str]:
        """(reply, "" or "won" or "lost")."""
        reply: str = self._frotz.step(command)[0]
        ending = "won" if "*** The End ***" in reply else "lost" if "*** You lost! ***" in reply else ""
        return reply, ending

    def state(self) -> Any:
        return self._frotz.get_state()

    def load_state(self, state: Any) -> None:
        self._frotz.set_state(state)

    def close(self) -> None:
        if self._frotz is not None:
            self._frotz.close()
            self._frotz, self._story = None, None


def resolve(text: str, admissible: list[str]) -> str:
    """The admissible command that a text means, "" if there is none.

    Letter case, articles, common short forms and synonyms, and a missing "from" with one source are forgiven; nothing
    else is: what the engine might understand beyond that would leave the list of commands and the game out of step.
    """
    commands = {command.lower(): command for command in admissible}
    words = " ".join(word for word in text.lower().split() if word not in ARTICLES)
    words = SHORT.get(words, words)
    for pattern, command in REWRITES:
        if words not in commands:
            words = pattern.sub(command, words)
    if words not in commands and words.startswith("take ") and " from " not in words:
        sources = [command for command in commands if command.startswith(f"{words} from ")]
        words = sources[0] if len(sources) == 1 else words
    return commands.get(words, "")


def _recipe(ingredients: str, directions: list[str]) -> str:
    return f"recipe: {ingredients}. {', '.join(directions)}."


def _plain(reply: str) -> str:
    """The engine's sentence on one line: no prompt, status line, score notice or closing banner; lists with commas."""
    text = SCORED.sub("", END.sub("", STATUS.sub("", reply)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = " ".join(lines)
    if lines and lines[0].endswith(":"):
        text = f"{lines[0]} {', '.join(lines[1:])}"
    return "".join(c for c in text if c in CHARSET)
