"""Published claims, put to the test at a stated scale by a rule that was written down before the runs.

A recipe is a TOML file: the claim in a sentence, arms, seeds, the figure, what would confirm it, and the paper's own
configuration as a second scale that a GPU owner can start. The runs and their statistics are compare.py's; finished seeds
are shared by all recipes of a folder. A verdict that is negative or inconclusive stays.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from assay.compare import Plan, arm_of, compare, create
from assay.compare_report import replicate_table
from assay.config import Section, overlay, resolve
from assay.executors import Executor, Watch
from assay.files import read_file, read_json, write_file, write_json
from assay.judge import paired_interval
from assay.protocols import UserError

FOLDER = Path(__file__).parent / "recipes"
SHIPPED = FOLDER / "verdicts.json"  # of the runs behind docs/results.md
RECIPE_BYTES = 1 << 20
SCALES = ("tiny", "full")
Expected = Literal["higher", "lower", "no worse", "the same"]
HOLDS: dict[str, dict[str, str]] = {  # what was claimed -> what was found -> verdict on the claim
    "higher": {"better": "holds", "worse": "reversed", "no difference": "does not hold"},
    "lower": {"worse": "holds", "better": "reversed", "no difference": "does not hold"},
    "no worse": {"better": "holds", "no difference": "holds", "worse": "does not hold"},
    "the same": {"no difference": "holds", "better": "does not hold", "worse": "does not hold"},
}
RULES = {
    "higher": "holds if {a} is above {b} (corrected p at most {alpha:g}), is reversed if it is below, does not hold if the two "
    "are equal within {effect:g}; else inconclusive",
    "lower": "holds if {a} is below {b} (corrected p at most {alpha:g}), is reversed if it is above, does not hold if the two "
    "are equal within {effect:g}; else inconclusive",
    "no worse": "holds if {a} is above {b}, or not more than {effect:g} below it (one-sided at {alpha:g}); does not hold if it "
    "is below it (corrected p at most {alpha:g}); else inconclusive",
    "the same": "holds if {a} and {b} are equal within {effect:g} (two one-sided tests at {alpha:g}); does not hold if they "
    "differ (corrected p at most {alpha:g}); else inconclusive",
}


class Scale(Section):
    """One size at which a claim is tested."""

    about: str
    """Model, task, budget, in words, and what this scale cannot say."""
    seeds: int = Field(8, ge=2)
    """Training seeds of each arm."""
    effect: float = Field(0.05, gt=0)
    """Smallest difference that would matter."""
    common: dict[str, Any] = Field({})
    """Keys of a run that all arms share."""


class Recipe(Section):
    """A claim, and how it is tested."""

    claim: str
    """The paper's claim, in one sentence of ours."""
    paper: str
    """Where it is made."""
    fidelity: Literal["paper", "reconstruction", "inferred"]
    """How surely our arms are what the paper means."""
    metric: str = "iid sampled"
    """Figure that decides."""
    a: str
    """Arm that the claim is about."""
    b: str
    """Arm that it is measured against."""
    expected: Expected
    """What the claim says of a's figure against b's."""
    secondary: list[str] = Field([])
    """Further figures, reported and never decisive."""
    notes: str = ""
    """What a reader should know of the test."""
    arms: dict[str, dict[str, Any]]
    """Name -> keys of a run in which the arm differs."""
    tiny: Scale
    """On a laptop."""
    full: Scale
    """The paper's own configuration, as far as it is known."""

    def rule(self, scale: str) -> str:
        size: Scale = getattr(self, scale)
        alpha = Plan.model_fields["alpha"].default
        return f"{self.metric}: " + RULES[self.expected].format(a=self.a, b=self.b, effect=size.effect, alpha=alpha)


def recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda path: path.stem)}


def load(name: str) -> tuple[str, Recipe]:
    """(name, recipe) of one of ours or of a .toml file. UserError says what is wrong in it."""
    path = recipes().get(name, Path(name))
    if path.suffix != ".toml" or not path.is_file():
        raise UserError(f"recipe {name!r} does not exist: there are {', '.join(recipes())}, or give a .toml file")
    try:
        recipe = Recipe.model_validate(tomllib.loads(read_file(path, RECIPE_BYTES).decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected TOML, found something else ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if missing := {recipe.a, recipe.b} - set(recipe.arms):
        raise UserError(f"{path}: a and b are {recipe.a!r} and {recipe.b!r}, and there is no arm {', '.join(missing)}")
    return path.stem, recipe


def plan_of(name: str, recipe: Recipe, scale: str, seeds: int = 0) -> Plan:
    """The comparison that tests the claim; b is the first arm, so that the pair is a against b."""
    size: Scale = getattr(recipe, scale)
    order = [recipe.b, *(arm for arm in recipe.arms if arm not in (recipe.a, recipe.b)), recipe.a]
    command = f"assay replicate {name}" + (f" --scale {scale}" if scale != SCALES[0] else "")
    return Plan(
        arms={arm: arm_of(resolve(overlay(size.common, recipe.arms[arm]), f"{name}, arm {arm}")) for arm in order},
        seeds=list(range(seeds or size.seeds)),
        metric=recipe.metric,
        secondary=recipe.secondary,
        effect=size.effect,
        store="../seeds",
        command=command + (f" --seeds {seeds}" if seeds else ""),
    )


def replicate(
    name: str, out: Path, executor: Executor, watch: Watch | None = None, scale: str = "tiny", seeds: int = 0
) -> dict[str, Any]:
    """Runs what is missing of a recipe, decides, and writes OUT/verdicts.json and OUT.md: the verdict's record."""
    name, recipe = load(name)
    folder = out / (name if scale == SCALES[0] else f"{name}-{scale}")
    create(folder, plan_of(name, recipe, scale, seeds))
    result = compare(folder, executor, watch)
    verdict = decide(name, recipe, scale, result)
    known = {(v["name"], v["scale"]): v for v in verdicts(out)} | {(name, scale): verdict}
    write_json(out / "verdicts.json", {"verdicts": [known[at] for at in sorted(known)]})
    write_file(out.with_name(out.name + ".md"), replicate_table([known[at] for at in sorted(known)]).encode())
    return verdict


def decide(name: str, recipe: Recipe, scale: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The rule, applied to the pair (a, b)."""
    pair = _pair(result, recipe, recipe.metric)
    found = HOLDS[recipe.expected].get(pair["verdict"], "inconclusive")
    if found == "inconclusive" and recipe.expected == "no worse" and _no_worse(pair, result):
        found = "holds"
    if result["unfinished"]:
        found = "inconclusive"
    others = [m for m in result["metrics"] if m != recipe.metric]
    return {
        "name": name,
        "claim": recipe.claim,
        "paper": recipe.paper,
        "fidelity": recipe.fidelity,
        "scale": scale,
        "about": getattr(recipe, scale).about,
        "arms": [recipe.a, recipe.b],
        "seeds": pair["n"],
        "metric": recipe.metric,
        "difference": pair["difference"],
        "verdict": found,
        "sentence": pair["sentence"],
        "decision_rule": recipe.rule(scale),
        "notes": recipe.notes,
        "secondary": [{"metric": m, "difference": _pair(result, recipe, m)["difference"]} for m in others],
        "means": {arm: result["arms"][arm]["mean"] for arm in result["arms"]},
        **{key: result[key] for key in ("command", "date", "assay", "env", "model", "environment_version", "panel")},
    }


def _no_worse(pair: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Non-inferiority: the one-sided lower bound of the paired t interval is above -effect."""
    if not pair["sd"]:  # too few, or all equal: no spread to judge by
        return False
    inner = paired_interval(pair["difference"]["estimate"], pair["sd"], pair["n"], 1 - 2 * result["alpha"])
    return inner.low > -result["effect"]


def _pair(result: Mapping[str, Any], recipe: Recipe, metric: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        p for p in result["pairs"] if p["metric"] == metric and (p["a"], p["b"]) == (recipe.a, recipe.b)
    )
    return found


def verdicts(out: Path) -> list[dict[str, Any]]:
    """Of a folder of results, or those that came with the package."""
    path = out / "verdicts.json"
    if not path.exists():
        return []
    found = read_json(path, 1 << 26).get("verdicts")
    if not isinstance(found, list):
        raise UserError(f"{path}: expected a list of verdicts, found {str(found)[:60]}: remove the file")
    return found
