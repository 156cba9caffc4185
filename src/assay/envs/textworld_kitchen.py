"""TextWorld-Cooking as a symbolic game: what can be done now, what it changes, and a planner.

The text, the score and the end of an episode come from the real engine. This model only follows along, because the
engine's own tracker needs 0.2 s to load a game and milliseconds for each list of admissible commands; the tests compare
the two on random walks. The rules are those of `textworld/challenges/tw_cooking/textworld_data/logic`.
Left out on purpose: keys and locks, which no cooking game has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

HELD = "I"  # the holder of what the player carries
GONE = ""  # the holder of what was eaten or used
CUTS = {"chopped": "chop", "sliced": "slice", "diced": "dice"}
COOKS = {"stove": "fried", "oven": "roasted", "toaster": "grilled"}  # type of appliance -> what it does
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass(frozen=True, slots=True)
class Food:
    """`cooking` and `cutting` are "raw"/"uncut" or a participle. `needs_cooking`: inedible until cooked."""

    cooking: str
    cutting: str
    cooked: bool
    edible: bool
    needs_cooking: bool
    burned: bool = False

    def described(self, name: str) -> str:
        """As the engine lists it: "diced roasted carrot", "raw pork chop"."""
        cooking = "raw" if self.needs_cooking else "burned" if self.burned else self.cooking.replace("raw", "")
        return " ".join(word for word in (self.cutting.replace("uncut", ""), cooking, name) if word)


@dataclass(frozen=True, slots=True)
class State:
    """One moment of a game. Immutable: a step makes a new one."""

    room: str
    holder: Mapping[str, str]  # movable thing -> room, container, supporter, HELD or GONE
    opened: frozenset[str]  # open containers and doors
    foods: Mapping[str, Food]
    read: bool = False  # the cookbook, at least once
    done: frozenset[tuple[str, str]] = frozenset()  # recipe steps that were reached: ("take", food), ("eat", "meal")...


@dataclass(slots=True)
class Kitchen:
    """What never changes in one game, read from its record (`textworld_games.record`)."""

    kinds: dict[str, str]  # name -> textworld type: r, d, c, s, stove, oven, toaster, f, meal, o
    exits: dict[str, dict[str, tuple[str, str]]]  # room -> direction -> (room, door or "")
    furniture: dict[str, list[str]]  # room -> containers and supporters
    openable: frozenset[str]  # doors and containers, not the BBQ
    sharp: frozenset[str]
    recipe: list[tuple[str, str, str]]  # (food, cooking, cutting) as the cookbook asks
    todo: frozenset[tuple[str, str]]  # steps of the recipe that the start leaves to do: the engine's scored quests
    place: str  # the room in which a meal can be prepared
    capacity: int  # things that can be carried; a large number without the drop skill
    start: State
    rooms: dict[str, str] = field(default_factory=dict)  # furniture -> room

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Kitchen:
        facts = [tuple(fact) for fact in record["facts"]]
        kinds: dict[str, str] = record["types"]
        by_name: dict[str, list[tuple[str, ...]]] = {}
        for name, *arguments in facts:
            by_name.setdefault(name, []).append(tuple(arguments))
        properties = {(name, args[0]) for name, *args in facts if len(args) == 1}
        holder = {thing: room for thing, room in by_name["at"] if kinds[thing] in ("f", "o", "meal")}
        holder |= {thing: where for thing, where in by_name.get("in", []) + by_name.get("on", []) if where != "RECIPE"}
        recipe = [(food, cooking, cutting) for food, cooking, cutting in record["ingredients"]]
        foods = {name: _food(name, properties) for name, kind in kinds.items() if kind == "f"}
        foods["meal"] = Food("raw", "uncut", cooked=False, edible=True, needs_cooking=False)
        furniture: dict[str, list[str]] = {room: [] for room, kind in kinds.items() if kind == "r"}
        for thing, room in by_name["at"]:
            if kinds[thing] not in ("f", "o", "meal", "P"):
                furniture[room].append(thing)
        start = State(
            room=next(room for thing, room in by_name["at"] if thing == "P"),
            holder={"meal": GONE} | holder,
            opened=frozenset(name for (name,) in by_name.get("open", [])),
            foods=foods,
        )
        todo = {("prepare", "meal"), ("eat", "meal")}
        todo |= {("take", food) for food, _, _ in recipe if holder[food] != HELD}
        todo |= {("cook", food) for food, cooking, _ in recipe if foods[food].cooking != cooking}
        todo |= {("cut", food) for food, _, cutting in recipe if foods[food].cutting != cutting}
        return cls(
            kinds=kinds,
            exits=_exits(furniture, by_name),
            furniture=furniture,
            openable=frozenset(name for state in ("open", "closed") for (name,) in by_name.get(state, [])),
            sharp=frozenset(name for (name,) in by_name.get("sharp", [])),
            recipe=recipe,
            todo=frozenset(todo),
            place=by_name["cooking_location"][0][0],
            capacity=record["capacity"],
            start=start,
            rooms={thing: room for room, things in furniture.items() for thing in things},
        )

    def held(self, state: State) -> list[str]:
        return [thing for thing, where in state.holder.items() if where == HELD]

    def inside(self, state: State, holder: str) -> list[str]:
        return [thing for thing, where in state.holder.items() if where == holder]

    def is_container(self, thing: str) -> bool:
        return self.kinds[thing] in ("c", "oven", "toaster")

    def reachable(self, state: State, thing: str) -> bool:
        """Furniture of this room whose contents can be touched."""
        return not self.is_container(thing) or thing in state.opened

    def doors(self, state: State) -> list[str]:
        return [door for _, door in self.exits[state.room].values() if door]

    def admissible(self, state: State) -> list[str]:
        """Sorted commands that the engine lists in this state (for a game that has not ended)."""
        here, held = self.furniture[state.room], self.held(state)
        full = len(held) >= self.capacity
        commands = {"look", "inventory"}
        for direction, (_, door) in self.exits[state.room].items():
            if not door or door in state.opened:
                commands.add(f"go {direction}")
        for thing in [*here, *self.doors(state)]:
            if thing in self.openable:
                commands.add(f"{'close' if thing in state.opened else 'open'} {thing}")
        for thing in here:
            commands.add(f"examine {thing}")
            if self.reachable(state, thing):
                for item in self.inside(state, thing):
                    commands.add(f"examine {item}")
                    if not full:
                        commands.add(f"take {item} from {thing}")
                verb, preposition = ("insert", "into") if self.is_container(thing) else ("put", "on")
                commands |= {f"{verb} {item} {preposition} {thing}" for item in held}
        for item in self.inside(state, state.room):
            commands.add(f"examine {item}")
            if not full:
                commands.add(f"take {item}")
        commands |= {f"drop {item}" for item in held}
        for food in held:
            if food in state.foods:
                commands |= self._food_commands(state, food, held, here)
        if state.room == self.place and state.holder[self.recipe[0][0]] == HELD:
            commands.add("prepare meal")  # listed with the first ingredient; refused by the engine until all is ready
        return sorted(commands)

    def _food_commands(self, state: State, name: str, held: list[str], here: list[str]) -> set[str]:
        food, commands = state.foods[name], set()
        if food.edible:
            commands.add(f"eat {name}")
        if food.cutting == "uncut" and name != "meal":
            commands |= {f"{verb} {name} with {tool}" for verb in CUTS.values() for tool in held if tool in self.sharp}
        if food.edible or not food.cooked:
            commands |= {f"cook {name} with {thing}" for thing in here if self.kinds[thing] in COOKS}
        return commands

    def after(self, state: State, command: str) -> State:
        """The state after an admissible command; the same object when nothing changes."""
        verb, _, rest = command.partition(" ")
        if verb == "go":
            return replace(state, room=self.exits[state.room][rest][0])
        if verb in ("open", "close"):
            return replace(state, opened=state.opened ^ {rest})
        if command == "examine cookbook":
            return state if state.read else replace(state, read=True)
        if verb == "take":
            return self._reached(self._move(state, rest.split(" from ")[0], HELD))
        if verb == "drop":
            return self._move(state, rest, state.room)
        if verb in ("insert", "put"):
            return self._move(state, *rest.split(" into " if verb == "insert" else " on "))
        if verb == "eat":
            return replace(self._move(state, rest, GONE), done=state.done | {("eat", rest)})
        if verb in CUTS.values():
            name = rest.split(" with ")[0]
            cutting = next(participle for participle, cut in CUTS.items() if cut == verb)
            return self._reached(self._change(state, name, replace(state.foods[name], cutting=cutting)))
        if verb == "cook":
            name, appliance = rest.split(" with ")
            return self._reached(self._change(state, name, self._cooked(state.foods[name], appliance)))
        if verb == "prepare" and all(self._ready(state, *ingredient) for ingredient in self.recipe):
            holder = {**state.holder, **{food: GONE for food, _, _ in self.recipe}, "meal": HELD}
            return replace(state, holder=holder, done=state.done | {("prepare", "meal")})
        return state

    def _cooked(self, food: Food, appliance: str) -> Food:
        if food.cooked:
            return replace(food, burned=True, edible=False)
        return replace(food, cooking=COOKS[self.kinds[appliance]], cooked=True, edible=True, needs_cooking=False)

    def _ready(self, state: State, food: str, cooking: str, cutting: str) -> bool:
        done = state.foods[food].cooking == cooking and state.foods[food].cutting == cutting
        return done and state.holder[food] == HELD

    def _move(self, state: State, thing: str, holder: str) -> State:
        return replace(state, holder={**state.holder, thing: holder})

    def _change(self, state: State, name: str, food: Food) -> State:
        return replace(state, foods={**state.foods, name: food})

    def _reached(self, state: State) -> State:
        done = {("take", food) for food, _, _ in self.recipe if state.holder[food] == HELD}
        done |= {("cook", food) for food, cooking, _ in self.recipe if state.foods[food].cooking == cooking}
        done |= {("cut", food) for food, _, cutting in self.recipe if state.foods[food].cutting == cutting}
        return replace(state, done=state.done | (done & self.todo))

    # ------------------------------------------------------------------------------------------------ planner

    def expert(self, state: State) -> str:
        """The next command on a way to the meal from any state of a game that is not lost.

        It knows where everything is, but reads the cookbook first, so that an imitator can know why. It goes through
        the recipe in the order of the cookbook: gather, cut, cook, prepare, eat; not always by the shortest way.
        """
        if state.holder["meal"] != GONE:
            return self._fetch(state, "meal", keep=()) or "eat meal"
        if not state.read:
            return self._find(state, "cookbook") or "examine cookbook"
        ingredients = [food for food, _, _ in self.recipe]
        cuts = [(food, cut) for food, _, cut in self.recipe if state.foods[food].cutting != cut]
        cooks = [(food, cooking) for food, cooking, _ in self.recipe if state.foods[food].cooking != cooking]
        knife = next(iter(self.sharp), "")
        gather = self._fetch_all(state, ingredients)
        if gather and self.capacity > len(ingredients):
            return gather
        if cuts:
            food, cut = cuts[0]
            step = self._fetch(state, food, (food, knife)) or self._fetch(state, knife, (food, knife))
            return step or f"{CUTS[cut]} {food} with {knife}"
        if cooks:
            food, cooking = cooks[0]
            appliance = next(thing for thing in self.rooms if COOKS.get(self.kinds[thing]) == cooking)
            step = self._fetch(state, food, ingredients) or self._go(state, self.rooms[appliance])
            return step or f"cook {food} with {appliance}"
        return gather or self._go(state, self.place) or "prepare meal"

    def plan(self, state: State, limit: int = 200) -> list[str]:
        """The expert's commands from a state to the eaten meal; shorter than `limit` or it does not get there."""
        commands: list[str] = []
        while ("eat", "meal") not in state.done and len(commands) < limit:
            commands.append(self.expert(state))
            state = self.after(state, commands[-1])
        return commands

    def _fetch_all(self, state: State, things: Iterable[str]) -> str:
        things = tuple(things)
        return next((step for thing in things if (step := self._fetch(state, thing, things))), "")

    def _fetch(self, state: State, thing: str, keep: Iterable[str]) -> str:
        """The next command towards carrying the thing, "" when it is carried. `keep` is not laid down to make room."""
        where = state.holder[thing]
        if where == HELD:
            return ""
        held = self.held(state)
        if len(held) >= self.capacity:
            ingredients = {food for food, _, _ in self.recipe}
            spare = sorted((item for item in held if item not in keep), key=lambda item: item in ingredients)
            return f"drop {spare[0]}"
        step = self._find(state, thing)
        return step or (f"take {thing}" if where == state.room else f"take {thing} from {where}")

    def _find(self, state: State, thing: str) -> str:
        """The next command towards a thing that can be touched, "" when it can."""
        where = state.holder[thing]
        if where == HELD:
            return f"drop {thing}"
        if where in self.rooms:
            step = self._go(state, self.rooms[where])
            return step or ("" if self.reachable(state, where) else f"open {where}")
        return self._go(state, where)

    def _go(self, state: State, room: str) -> str:
        """The first command of a shortest way through rooms and doors, "" on arrival."""
        first: dict[str, str] = {state.room: ""}
        queue = deque([state.room])
        while queue:
            here = queue.popleft()
            for direction, (there, door) in self.exits[here].items():
                if there not in first:
                    closed = door and door not in state.opened
                    first[there] = first[here] or (f"open {door}" if closed else f"go {direction}")
                    queue.append(there)
        return first[room]


def _food(name: str, properties: set[tuple[str, str]]) -> Food:
    def one(values: Iterable[str], otherwise: str) -> str:
        return next((value for value in values if (value, name) in properties), otherwise)

    return Food(
        cooking=one(COOKS.values(), "raw"),
        cutting=one(CUTS, "uncut"),
        cooked=("cooked", name) in properties,
        edible=("edible", name) in properties,
        needs_cooking=("needs_cooking", name) in properties,
    )


def _exits(rooms: Iterable[str], facts: Mapping[str, list[tuple[str, ...]]]) -> dict[str, dict[str, tuple[str, str]]]:
    doors = {(here, there): door for here, door, there in facts.get("link", [])}
    exits: dict[str, dict[str, tuple[str, str]]] = {room: {} for room in rooms}
    for direction in OPPOSITE:
        for there, here in facts.get(f"{direction}_of", []):
            exits[here][direction] = (there, doors.get((here, there), ""))
            exits[there][OPPOSITE[direction]] = (here, doors.get((there, here), ""))
    return exits
