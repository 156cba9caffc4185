"""EnvRL: what the environment answered is a target too.

Every turn of every episode is a transition (observation, action, next observation). Two supervised losses on the policy
itself, beside the RL loss, learn from it: what an action does, and which action was done. Left out: sampling
transitions by their entropy, clipped losses, and a replay buffer, all of other papers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.protocols import Method, Setting, UserError
from assay.rng import generator
from assay.rows import Row, Stream
from assay.schedules import SCHEDULES
from assay.trace import Ids, Outcome, Provenance, Trace

VIEWS, WORDINGS, DENOMINATORS = ("executed", "response"), ("auto", "brief", "full"), ("token", "sequence")
BRIEF = 40  # characters of an environment's instructions: with fewer the prompts here are a few words as well
WEIGHT = "multiplicity"  # column: how much one row stands for equal examples


class Wording(NamedTuple):
    """Texts of the two questions. `past` repeats before `seen`; a question is `past* seen sp` or `past* seen id`."""

    past: str
    seen: str
    sp: str
    id: str


WORDING = {
    "brief": Wording("{seen}\n> {action}\n", "{seen}", "\n> {action}\nnext?", "\nnext: {after}\naction?"),
    "full": Wording(
        "Observation:\n{seen}\n\nAction: {action}\n\n",
        "Observation:\n{seen}",
        "\n\nAction: {action}\n\nPredict the next observation. Answer with its text only.",
        "\n\nNext observation:\n{after}\n\nWhich single action led to the next observation? Answer with the action only.",
    ),
}


class Transition(NamedTuple):
    """(s, a, s') as text: turn `turn` of the trace, and `after`, the raw observation that followed."""

    trace: Trace
    turn: int
    after: str


def transitions(trace: Trace) -> list[Transition]:
    """The turns that were answered, in order. None for the turn that the environment failed on, for an answer that ran
    out of context (it was not executed), and where the environment said nothing."""
    after = [*(turn.observation for turn in trace.turns[1:]), trace.final_observation]
    answered = len(trace.turns) - (trace.outcome is Outcome.ENVIRONMENT_ERROR)
    return [
        Transition(trace, t, after[t])
        for t, turn in enumerate(trace.turns[: max(answered, 0)])
        if after[t] and turn.stop != "context"
    ]


def subset(n: int, fraction: float, draw: np.random.Generator) -> NDArray[np.int64]:
    """floor(fraction x n + 1/2) of the indices 0 .. n - 1, without replacement, in order: halves round up."""
    return np.sort(draw.choice(n, math.floor(fraction * n + 0.5), replace=False)).astype(np.int64)


def multiplicities(counts: ArrayLike, lengths: ArrayLike, denominator: str) -> NDArray[np.float64]:
    """Token weight of each of B distinct rows, so that their loss is that of all examples written out one by one.

    "token": `c_b sum(L) / sum(c L)`; "sequence": `c_b B / sum(c)`. The learner divides by the tokens (rows) that it
    sees, sum(L) (B); what is meant is the mean over those of the multiset.

    Args:
      counts: [B] c, equal examples that a row stands for, >= 1.
      lengths: [B] L, target tokens of each row.

    Returns:
      [B].
    """
    c, each = np.asarray(counts, np.float64), np.asarray(lengths, np.float64)
    each = each if denominator == "token" else np.ones_like(each)
    return np.asarray(c * each.sum() / (c * each).sum())


class EnvRL(Method):
    """Two supervised losses on the policy's own transitions: predict the next observation, name the action.

    Beside the policy loss, the policy learns from the transitions (s, a, s') of its own episodes of this step: state
    prediction (SP) of s' from s and a, inverse dynamics (ID) of a from s and s'. Both are cross-entropies per target
    token, weighted by a factor that falls to 0 over the run. Rewards and advantages are not touched, and nothing
    changes at inference.

    lam_sp: weight of state prediction at the start, per nat; 0 switches it off (paper: 0.2 at 1.5B, 0.1 at 7B).
    lam_id: weight of inverse dynamics at the start, per nat; 0 switches it off (paper: 0.2 at 1.5B, 0.1 at 7B).
    fraction: share of the transitions of an optimiser step that are learnt from, above 0 to 1 (paper: 1).
    view: target of inverse dynamics: "executed", the action's text, or "response", all sampled tokens (ours: executed).
    history: earlier turns shown before an observation, in turns (ours: 0).
    skip_noop: leave out of inverse dynamics what changed nothing (ours: False).
    max_target: longest target, in tokens; the rest is cut off and counted (ours: 256).
    schedule: of both weights over the run, "cosine", "linear" or "constant" (paper: cosine).
    denominator: mean over target tokens, "token", or over examples of their token means, "sequence" (ours: token).
    wording: of the questions: "brief", "full", or "auto", brief where the environment's instructions are (ours: auto).
    """

    name = "envrl"
    paper = "arXiv 2606.17680, EnvRL: Learn from Environment Dynamics in Agentic Reinforcement Learning"
    fidelity = "reconstruction"

    def __init__(
        self,
        lam_sp: float = 0.2,
        lam_id: float = 0.2,
        fraction: float = 1.0,
        view: str = "executed",
        history: int = 0,
        skip_noop: bool = False,
        max_target: int = 256,
        schedule: str = "cosine",
        denominator: str = "token",
        wording: str = "auto",
    ) -> None:
        for setting, value in (("lam_sp", lam_sp), ("lam_id", lam_id)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{setting} is a weight of 0 or more, not {value}")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is above 0 and at most 1, not {fraction}")
        for setting, number, least in (("history", history, 0), ("max_target", max_target, 1)):
            if number < least:
                raise ValueError(f"{setting} is {least} or more, not {number}")
        choices = {"view": (view, VIEWS), "schedule": (schedule, tuple(SCHEDULES)), "wording": (wording, WORDINGS)}
        choices["denominator"] = (denominator, DENOMINATORS)
        for setting, (found, allowed) in choices.items():
            if found not in allowed:
                raise ValueError(f"{setting} is one of {', '.join(allowed)}, not {found!r}")
        self.lam = {"sp": lam_sp, "id": lam_id}
        self.fraction, self.view, self.history, self.skip_noop = fraction, view, history, skip_noop
        self.max_target, self.schedule, self.denominator, self.wording = max_target, schedule, denominator, wording

    def bind(self, setting: Setting) -> Sequence[str]:
        self.setting = setting
        self.words: dict[str, Wording] = {}
        for name, world in setting.worlds.items():
            if not hasattr(world.renderer, "answer"):
                raise UserError(f"envrl needs a renderer that writes answers, and that of {name!r} has no answer(text)")
            brief = 0 < len(getattr(world.renderer, "instructions", "")) <= BRIEF
            auto = "brief" if brief else "full"
            self.words[name] = WORDING[auto if self.wording == "auto" else self.wording]
        return () if any(self.lam.values()) else ("lam_sp and lam_id are 0: envrl changes nothing",)

    def streams(self, rows: Sequence[Row], streams: list[Stream], progress: float) -> list[Stream]:
        """Adds "sp" and "id" where their weight is above 0 and there is a transition."""
        factor = SCHEDULES[self.schedule](progress, 1.0, 0.0)
        lam = {name: value * factor for name, value in self.lam.items() if value * factor > 0}
        if not lam:
            return streams
        traces = {row.trace.key: row.trace for row in rows if not row.view}
        found = [t for key in sorted(traces) for t in transitions(traces[key])]
        if not found:
            return streams
        chosen = found
        if self.fraction < 1:
            draw = generator(self.setting.seed, "envrl", *sorted(traces))
            chosen = [found[i] for i in subset(len(found), self.fraction, draw)]
        made = [self._stream(name, weight, chosen) for name, weight in lam.items()]
        made[0].metrics["envrl_transitions"] = float(len(found))
        return [*streams, *made]

    def _stream(self, name: str, weight: float, chosen: Sequence[Transition]) -> Stream:
        """All examples of one kind; equal ones are one row that weighs as much as they do."""
        equal: dict[tuple[str, bytes, str, bytes], list[Transition]] = {}
        for transition in chosen:
            if name == "sp" or self._names_an_action(transition):
                trace, target = transition.trace, self._target(name, transition)[0]
                question = self._question(name, transition)
                key = (trace.task.environment, trace.prompt_ids.tobytes(), question, target.tobytes())
                equal.setdefault(key, []).append(transition)
        rows: list[Row] = []
        counts: list[int] = []
        truncated = dropped = 0
        for (_, _, question, _), same in equal.items():
            row, cut = self._row(name, same[0], question)
            if row is None:
                dropped += len(same)
                continue
            truncated += cut * len(same)
            rows.append(row)
            counts.append(len(same))
        if rows:
            weights = multiplicities(counts, [len(row.at) for row in rows], self.denominator)
            for row, each in zip(rows, weights, strict=True):
                row.columns[WEIGHT] = np.full(len(row.at), each, np.float32)
        numbers = {"lam": weight, "examples": sum(counts), "rows": len(rows)}
        numbers |= {"truncated": truncated, "dropped": dropped}
        metrics = {f"envrl_{key}_{name}": float(value) for key, value in numbers.items()}
        return Stream(name, rows, "nll", self.denominator, {}, weight, WEIGHT, metrics)

    def _names_an_action(self, transition: Transition) -> bool:
        """What the environment did not understand is no action to name; as dynamics ("nothing happens") it is true."""
        turn = transition.trace.turns[transition.turn]
        return turn.valid and not (self.skip_noop and (turn.noop or transition.after == turn.observation))

    def _question(self, name: str, transition: Transition) -> str:
        """The text that the target answers. Of the next turn SP sees nothing; ID sees raw observations only, no later
        prompt: such a prompt may repeat the action."""
        trace, t, after = transition
        words, turn = self.words[trace.task.environment], trace.turns[t]
        past = [
            words.past.format(seen=p.observation, action=p.action) for p in trace.turns[max(0, t - self.history) : t]
        ]
        asked = words.sp.format(action=turn.action) if name == "sp" else words.id.format(after=after)
        return "".join(past) + words.seen.format(seen=turn.observation) + asked

    def _target(self, name: str, transition: Transition) -> tuple[Ids, NDArray[np.uint8]]:
        """(ids, provenance), the end token included; sampled ids are spliced as they are."""
        turn = transition.trace.turns[transition.turn]
        if name == "id" and self.view == "response":
            return turn.ids, turn.provenance
        renderer: Any = self.setting.worlds[transition.trace.task.environment].renderer
        ids: Ids = renderer.answer(transition.after if name == "sp" else turn.action)
        return ids, np.full(len(ids), Provenance.FORCED, np.uint8)

    def _row(self, name: str, transition: Transition, question: str) -> tuple[Row | None, bool]:
        """(row, was its target cut): the question as an observation behind the episode's own prompt, and its answer. None
        where not one target token fits."""
        trace, (target, provenance) = transition.trace, self._target(name, transition)
        asked = self.setting.worlds[trace.task.environment].renderer.observation(question, first=True)
        start = len(trace.prompt_ids) + len(asked[0])
        end = start + min(len(target), self.max_target, self.setting.max_row_tokens - start)
        if end <= start:
            return None, True
        row = Row(
            trace,
            transition.turn,
            name,
            np.concatenate([trace.prompt_ids, asked[0], target])[:end].astype(np.int32),
            np.concatenate([trace.prompt_provenance, asked[1], provenance])[:end].astype(np.uint8),
            np.arange(start, end, dtype=np.int32),
            np.full(end - start, transition.turn, np.int32),
            shared=len(trace.prompt_ids),
        )
        return row, end - start < len(target)
