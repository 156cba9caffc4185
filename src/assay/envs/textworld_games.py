"""Makes TextWorld-Cooking games and keeps them: levels, seeds, splits by content, a cache that many processes share.

`textworld` needs about a second a game (generation and the Inform 7 compiler), so a game is made once, in a process
of its own, and lies in the cache as `NAME.z8` (for the engine) and `NAME.json` (its facts: `record`). A game is written
beside and renamed, its `.json` last: what has a `.json` is whole. An index says which seeds belong to which split.
Run as a program it is that process: `python -m assay.envs.textworld_games FOLDER < JOBS`, one JSON line a game.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from assay.envs.base import bucket, candidate_seed
from assay.protocols import UserError
from assay.rng import stable_hash

FORMAT = 1  # of records and index: older ones are left alone, not read
SECONDS = 120  # a game takes about one; more than this is a hang
PLENTY = 1000  # things one can carry where the drop skill is off
SHIPPED = Path(__file__).parent / "data" / "textworld.json"  # indices of the default settings, so nobody rebuilds them


@dataclass(frozen=True, slots=True)
class Level:
    """Settings of `tw-make tw-cooking`. `recipe` ingredients of which `take` must be found, `go` rooms (1, 6, 9, 12)."""

    recipe: int = 1
    take: int = 1
    go: int = 1
    open: bool = True
    cook: bool = False
    cut: bool = False
    drop: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.recipe <= 5 or not 0 <= self.take <= self.recipe or self.go not in (1, 6, 9, 12):
            raise UserError(
                f"textworld-cooking cannot make recipe={self.recipe}, take={self.take}, go={self.go}: "
                "set recipe to 1..5, take to 0..recipe, go to 1, 6, 9 or 12"
            )

    @property
    def slug(self) -> str:
        skills = [skill for skill in ("open", "cook", "cut", "drop") if getattr(self, skill)]
        return "-".join([f"r{self.recipe}t{self.take}g{self.go}", *skills])

    def harder(self) -> Level:
        """The same with one more ingredient to find, or more rooms where five is the limit."""
        if self.recipe < 5:
            return replace(self, recipe=self.recipe + 1, take=self.take + 1)
        if self.go == 12:
            raise UserError("textworld-cooking has nothing harder than recipe=5, go=12 for ood: lower one of them")
        return replace(self, go={1: 6, 6: 9, 9: 12}[self.go])


@dataclass(frozen=True, slots=True)
class Entry:
    """One task of a split."""

    level: Level
    seed: int
    hash: str

    @property
    def name(self) -> str:
        return f"{self.level.slug}-{self.seed}"


def default_cache() -> Path:
    """$ASSAY_CACHE, or the platform's cache folder for users."""
    if folder := os.environ.get("ASSAY_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "assay"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"


def textworld_version() -> str:
    """Raises UserError where the package is missing."""
    if importlib.util.find_spec("textworld") is None:
        raise UserError("textworld-cooking needs the package textworld: pip install assay[textworld]")
    return importlib.metadata.version("textworld")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock. The kernel frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_beside(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".making-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


class Library:
    """The games of one environment's settings. `levels` are dealt out in turn to the candidates of train and iid.

    Candidates are numbered; number n has the seed `candidate_seed(...)`, a level, and a content hash that decides its
    bucket. A split lists its candidates in order of number, so task i is the same whatever the number of tasks asked.
    """

    def __init__(self, levels: list[Level], sizes: dict[str, int], cache: Path | None = None) -> None:
        self.levels = {"train": levels, "ood": [level.harder() for level in levels]}
        self.sizes = sizes
        self.textworld = textworld_version()
        root = (cache or default_cache()) / "textworld" / f"{self.textworld}-{FORMAT}"
        self.key = stable_hash(json.dumps([[level.slug for level in levels], self.textworld, FORMAT]))
        self.games = root / "games"
        self.index_path = root / f"index-{self.key}.json"
        self.index: dict[str, Any] = {}  # "tried": candidates so far; per split rows [index of level, seed, hash]

    def entry(self, split: str, task: int) -> Entry:
        """The task's game, made if need be. Makes the whole split first where no index is known."""
        if not 0 <= task < self.sizes[split]:
            raise UserError(
                f"textworld-cooking has no task {task} in {split}: ids go from 0 to {self.sizes[split] - 1}"
            )
        entry = self.entries(split, self.sizes[split])[task]
        if not self.record_path(entry).exists():
            with locked(self.games / f".{entry.name}.lock"):
                if not self.record_path(entry).exists():  # another process may have made it meanwhile
                    self.make([entry])
        return entry

    def entries(self, split: str, count: int, jobs: int = 1) -> list[Entry]:
        """The first tasks of a split; candidates are tried until there are enough."""
        if len(self.index.get(split, [])) < count:
            self.index = self._read_index()
        if len(self.index[split]) < count:
            with locked(self.index_path.with_suffix(".lock")):
                self.index = self._read_index()  # another process may have made them meanwhile
                while len(self.index[split]) < count:
                    self._try_candidates(split, count, jobs)
                    write_beside(self.index_path, json.dumps(self.index))
        levels = self.levels["ood" if split == "ood" else "train"]
        return [Entry(levels[level], seed, content) for level, seed, content in self.index[split][:count]]

    def prepare(self, split: str, count: int | None = None, jobs: int = 1) -> list[Entry]:
        """Make the split's games that are not in the cache, `jobs` at a time, with progress on standard error."""
        entries = self.entries(split, self.sizes[split] if count is None else count, jobs)
        self.make([entry for entry in entries if not self.record_path(entry).exists()], jobs)
        return entries

    def record_path(self, entry: Entry) -> Path:
        return self.games / f"{entry.name}.json"

    def story_path(self, entry: Entry) -> Path:
        return self.games / f"{entry.name}.z8"

    def record(self, entry: Entry) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.record_path(entry).read_text())
        if record["hash"] != entry.hash:
            raise UserError(
                f"the game {self.record_path(entry)} has content {record['hash']} where the index says {entry.hash}: "
                f"remove {self.index_path} and the folder {self.games}, they were made by different generators"
            )
        return record

    def make(self, entries: list[Entry], jobs: int = 1) -> None:
        """Games that textworld cannot make for a seed get a record with an empty hash: candidates that no split takes."""
        if not entries:
            return
        self.games.mkdir(parents=True, exist_ok=True)
        _sweep(self.games)
        shares = [entries[start::jobs] for start in range(min(jobs, len(entries)))]
        with progress(len(entries)) as made, ThreadPoolExecutor(len(shares)) as pool:
            for future in [pool.submit(_work, self.games, share, made) for share in shares]:
                future.result()

    def _read_index(self) -> dict[str, Any]:
        if self.index_path.exists():
            index: dict[str, Any] = json.loads(self.index_path.read_text())
            return index
        shipped = json.loads(SHIPPED.read_text()) if SHIPPED.exists() else {}
        return shipped.get(self.key) or {"tried": {"train": 0, "ood": 0}, "train": [], "iid": [], "ood": []}

    def _try_candidates(self, split: str, count: int, jobs: int) -> None:
        """Make the next candidates of the split's stream and append each to the split that its content belongs to."""
        stream = "ood" if split == "ood" else "train"
        missing = count - len(self.index[split])
        wanted = missing if split == "ood" else missing * 5 // (1 if split == "iid" else 4)  # see base.IID_SHARE
        batch = max(2, min(64, wanted))
        first = self.index["tried"][stream]
        levels = self.levels[stream]
        candidates = [
            (n % len(levels), candidate_seed("textworld-cooking", stream, n, 0)) for n in range(first, first + batch)
        ]
        entries = [Entry(levels[level], seed, "") for level, seed in candidates]
        self.make([entry for entry in entries if not self.record_path(entry).exists()], jobs)
        known = {row[2] for rows in ("train", "iid", "ood") for row in self.index[rows]}
        for (level, seed), entry in zip(candidates, entries, strict=True):
            content = json.loads(self.record_path(entry).read_text())["hash"]
            if content and content not in known:
                known.add(content)
                self.index["ood" if stream == "ood" else bucket(content)].append([level, seed, content])
        self.index["tried"][stream] = first + batch


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A function to call once a game; a bar on a terminal, else a line every tenth. Nothing for a single game."""
    done = 0
    if total > 1 and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("making TextWorld games", total=total)
            yield lambda: bar.advance(task)
        return

    def line() -> None:
        nonlocal done
        done += 1
        if total > 1 and done * 10 // total > (done - 1) * 10 // total:
            print(f"made {done} of {total} TextWorld games", file=sys.stderr)

    yield line


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind, once it is surely dead."""
    for path in folder.glob(".making-*"):
        if time.time() - path.stat().st_mtime < 3600:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _work(folder: Path, entries: Iterable[Entry], made: Any) -> None:
    """Make games in one process of its own; its hang or crash is an error here, and leaves only whole games."""
    jobs = "".join(json.dumps([asdict(entry.level), entry.seed]) + "\n" for entry in entries)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "assay.envs.textworld_games", str(folder)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(jobs)
        process.stdin.close()
        for entry in entries:
            ready, _, _ = select.select([process.stdout], [], [], SECONDS)
            if not ready or not process.stdout.readline():
                process.kill()
                errors.seek(0)
                said = errors.read().strip().splitlines()[-1:] or ["nothing"]
                reason = f"ended and said: {said[0]}" if ready else f"took more than {SECONDS} s"
                raise UserError(f"the generator of the TextWorld game {entry.name} {reason}; try it again")
            made()


# ------------------------------------------------------------------------------------------- the generating process


def build(level: Level, seed: int) -> Any:
    """The `textworld.Game` of a level and seed, and the options it was made with."""
    import textworld
    from textworld.challenges.tw_cooking import cooking

    options = textworld.GameOptions()
    options.seeds = seed
    return cooking.make({**asdict(level), "recipe_seed": 0, "split": None}, options), options


def record(game: Any, level: Level, seed: int) -> dict[str, Any]:
    """What the environment needs to know of a game: facts by name, in a canonical order, and the recipe."""
    name = {var: infos.name or var for var, infos in game.infos.items()}
    facts = sorted([fact.name, *(name[argument.name] for argument in fact.arguments)] for fact in game.world.facts)
    types = {name[var]: infos.type for var, infos in game.infos.items()}
    slots = sum(kind == "slot" for kind in types.values())
    content = {"facts": facts, "ingredients": sorted(game.metadata["ingredients"])}
    return {
        "hash": stable_hash(json.dumps(content)),
        "level": asdict(level),
        "seed": seed,
        "facts": facts,
        "types": types,
        "ingredients": game.metadata["ingredients"],
        "capacity": slots if level.drop else PLENTY,
        "max_score": game.metadata["max_score"],
        "walkthrough": game.metadata["walkthrough"],
    }


def write_game(folder: Path, level: Level, seed: int) -> None:
    """Compile beside and rename. The record comes last, so an interruption leaves no game rather than half of one."""
    import textworld.generator
    from textworld.generator.inform7 import CouldNotCompileGameError

    name = Entry(level, seed, "").name
    try:
        game, options = build(level, seed)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as beside:
            options.path = f"{beside}/{name}.z8"
            textworld.generator.compile_game(game, options)
            os.replace(options.path, folder / f"{name}.z8")
        content = record(game, level, seed)
    except (CouldNotCompileGameError, IndexError, ValueError, AssertionError, AttributeError) as error:
        content = {"hash": "", "why": f"{type(error).__name__}: {error}"}  # some seeds have no place for an ingredient
    write_beside(folder / f"{name}.json", json.dumps(content))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compilers print must not be taken for an answer
    for line in sys.stdin:
        level, seed = json.loads(line)
        write_game(Path(sys.argv[1]), Level(**level), seed)
        print("made", file=answers, flush=True)


if __name__ == "__main__":
    main()
