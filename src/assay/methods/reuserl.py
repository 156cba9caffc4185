"""ReuseRL: successes are cheaper the fewer phrases of a shared dictionary spell them. The dictionary is in phrases.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from assay.advantages import all_equal
from assay.methods.phrases import LONGEST, Cluster, Code, Dictionary, Phrase, bound, extract
from assay.protocols import Method, Metrics, Setting, UserError
from assay.rows import Batch, Row
from assay.trace import Trace

COSTS = ("bits_sum", "count_sum", "generic")
OTHER = "other"  # the skill of an action that is none of the environment's


@dataclass(slots=True)
class Library:
    """Of one environment: its alphabet, the dictionary of the last step and the buffer of successes."""

    alphabet: tuple[str, ...]
    buffer: list[Phrase] = field(default_factory=list)  # oldest first
    found: Dictionary | None = None  # None before the first step, and after a resume until the next
    phrases: frozenset[Phrase] | None = None  # of two symbols and more, of the last step; None before the first
    first: dict[Phrase, int] = field(default_factory=dict)  # step that first had the phrase


class ReuseRL(Method):
    """Successes pay for the number of phrases that spell them, in a dictionary shared by all recent successes.

    Each turn is a symbol, the skill of its action. Before each update the most frequent adjacent pairs of phrases in the
    successes of this step and of a buffer are merged into a dictionary, as long as that shortens the two-part code of
    dictionary and successes. A success of score R then gets R - lam R seg/H: seg is the least number of phrases that
    spell its symbols, H the turn limit of its task. A routine that many successes share costs one phrase, however long
    it is; turns that belong to none cost one each. Failures are left as they are, and nothing enters the prompt.

    lam: share of its score that a success loses where seg is H, 0 to 1; 0 only logs (ours; the paper's is not known).
    max_phrase: longest phrase, in turns, 1 to 8 (paper: 4).
    buffer: past successes kept per environment, the oldest go first; 0 keeps none (ours).
    cost: what a merge must lower: bits_sum, count_sum, or generic with beta (ours; the paper's is not known).
    beta: of cost generic: weight of the dictionary's bits against the mean bits of a success (ours: about 1/512).
    extract: false leaves single symbols as the whole dictionary, a plain penalty on turns (the paper's round-length baseline).
    invalid_symbol: invalid actions are the symbol "other" and cost a phrase; false drops them (ours).
    forbid_powers: no phrase that repeats a shorter one, so that loops stay dear (ours, off as in the paper).
    warmup: steps over which lam rises from 0; 0 has it whole from the start (ours).
    """

    name = "reuserl"
    paper = "arXiv 2605.31509, Skill Reuse as Compression in Agentic RL"
    fidelity = "reconstruction"

    def __init__(
        self,
        lam: float = 0.5,
        max_phrase: int = 4,
        buffer: int = 512,
        cost: str = "bits_sum",
        beta: float = 0.002,
        extract: bool = True,
        invalid_symbol: bool = True,
        forbid_powers: bool = False,
        warmup: int = 0,
    ) -> None:
        if not 0 <= lam <= 1:
            raise ValueError(f"lam is {lam}: it must be 0 to 1, or a success could score below a failure")
        if not 1 <= max_phrase <= LONGEST:
            raise ValueError(f"max_phrase is {max_phrase}: it must be 1 to {LONGEST} turns")
        if buffer < 0 or warmup < 0:
            raise ValueError(f"buffer is {buffer} and warmup is {warmup}: neither may be below 0")
        if cost not in COSTS:
            raise ValueError(f"cost is {cost!r}: it must be one of {', '.join(COSTS)}")
        if not beta > 0:
            raise ValueError(f"beta is {beta}: it must be above 0")
        self.lam, self.max_phrase, self.buffer, self.warmup = lam, max_phrase, buffer, warmup
        self.cost, self.beta, self.extract = cost, beta, extract
        self.invalid_symbol, self.forbid_powers = invalid_symbol, forbid_powers
        self.libraries: dict[str, Library] = {}

    def bind(self, setting: Setting) -> Sequence[str]:
        for name, world in sorted(setting.worlds.items()):
            if not world.skills:
                raise UserError(
                    f"reuserl: environment {name} names no skills: give it `skills`, the alphabet of info['skill'], or "
                    "leave reuserl out"
                )
            alphabet = sorted(set(world.skills) - {OTHER}) + ([OTHER] if self.invalid_symbol else [])
            if (len(alphabet) + 1) ** self.max_phrase >= 1 << 62:
                raise UserError(f"reuserl: {name} has {len(alphabet)} skills: max_phrase {self.max_phrase} is too long")
            self.libraries[name] = Library(tuple(alphabet))
        return ["lam is 0: it prices nothing, and only logs"] if self.lam == 0 else []

    def reward(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Prices the successes of each environment, then moves them into its buffer."""
        metrics: Metrics = {}
        for name, library in self.libraries.items():
            traces = sorted((t for t in batch.traces if t.task.environment == name), key=lambda t: t.key)
            suffix = f"[{name}]" if len(self.libraries) > 1 else ""
            own = self._price(batch, library, traces)
            metrics |= {f"reuserl_{metric}{suffix}": value for metric, value in own.items()}
        return metrics

    def _price(self, batch: Batch, library: Library, traces: list[Trace]) -> Metrics:
        for trace in traces:
            _check_horizon(trace)
        successes = [t for t in traces if t.success]
        sequences = [self.symbols(t, library) for t in successes]
        code = Code(len(library.alphabet), self.max_phrase, self.cost, self.beta)
        longest = self.max_phrase if self.extract else 1
        cluster = Cluster([*library.buffer, *sequences], code.symbols, longest)
        found = library.found = extract(cluster, code, self.forbid_powers)
        costs = [found.cost[s] / t.horizon for s, t in zip(sequences, successes, strict=True)]
        lam, step = self.lam, traces[0].step if traces else 0
        if self.warmup:
            lam *= min(1.0, max(step, 0) / self.warmup)
        penalties = {t.key: lam * batch.scores[t.key] * c for t, c in zip(successes, costs, strict=True)}
        if lam:
            for key, penalty in penalties.items():
                batch.scores[key] -= penalty

        phrases = frozenset(found.phrases)
        bits = code.dictionary(len(found.phrases), sum(map(len, found.phrases)))
        metrics = {"phrases": float(len(phrases)), "dictionary_bits": bits}
        if costs:
            used = sum(found.cost[s] for s in sequences)
            metrics["cost"] = float(np.mean(costs))
            metrics["turns_per_phrase"] = sum(map(len, sequences)) / used if used else 1.0
            metrics["bound"] = bound(metrics["cost"], bits, self.max_phrase, len(costs))
        if library.phrases is not None:
            either = len(phrases | library.phrases)
            metrics["churn"] = 1 - len(phrases & library.phrases) / either if either else 0.0
        if traces:
            metrics["spread_groups"] = _spread(traces, penalties)
        library.phrases = phrases
        for phrase in found.phrases:
            library.first.setdefault(phrase, step)
        library.buffer = [*library.buffer, *sequences][-self.buffer :] if self.buffer else []
        metrics["buffer"] = float(len(library.buffer))
        return metrics

    def symbols(self, trace: Trace, library: Library) -> Phrase:
        """The skills of a trace; an invalid action, whatever its verb, and a skill of no alphabet are "other", or dropped."""
        known = {skill: i for i, skill in enumerate(library.alphabet)}
        found = (known.get(turn.skill if turn.valid else OTHER, known.get(OTHER)) for turn in trace.turns)
        return tuple(symbol for symbol in found if symbol is not None)

    def tables(self) -> Mapping[str, list[dict[str, Any]]]:
        """The phrases of each environment's dictionary, the most used first."""
        found = {}
        for name, library in self.libraries.items():
            uses = library.found.uses if library.found else {}
            phrases = sorted(library.phrases or (), key=lambda p: (-uses.get(p, 0), p))
            found[f"Phrases that spell the successes of {name}"] = [
                {
                    "phrase": " ".join(library.alphabet[a] for a in p),
                    "count": uses.get(p, 0),
                    "length": len(p),
                    "first step": library.first[p],
                }
                for p in phrases
            ]
        return {title: rows for title, rows in found.items() if rows}

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {
                "buffer": _packed(library.buffer),
                "phrases": None if library.phrases is None else _packed(sorted(library.phrases)),
                "seen": _packed(library.first),
                "first": np.array(list(library.first.values()), np.int32),
            }
            for name, library in self.libraries.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in state.items():
            library = self.libraries[name]
            library.buffer = list(_unpacked(own["buffer"]))
            library.phrases = None if own["phrases"] is None else frozenset(_unpacked(own["phrases"]))
            library.first = dict(zip(_unpacked(own["seen"]), own["first"].tolist(), strict=True))


def _check_horizon(trace: Trace) -> None:
    name = trace.task.environment
    if not trace.horizon:
        raise UserError(
            f"reuserl: {name} does not say its turn limit: let the info of its reset have 'horizon', an int"
        )
    if len(trace.turns) > trace.horizon:
        raise UserError(
            f"reuserl: an episode of {name} has {len(trace.turns)} turns, and its horizon is {trace.horizon}: let "
            "'horizon' be the most turns that a task can have"
        )


def _spread(traces: Sequence[Trace], penalties: Mapping[str, float]) -> float:
    """Share of the statistics groups that have successes only, of different prices: there a std-normalised advantage
    has its full size however small lam is."""
    groups = [list(own) for _, own in groupby(traces, key=lambda t: (t.group_key, t.mode))]
    spread = [all(t.success for t in own) and not all_equal([penalties[t.key] for t in own]) for own in groups]
    return sum(spread) / len(spread)


def _packed(sequences: Any) -> dict[str, Any]:
    """Many short sequences as two arrays."""
    sequences = list(sequences)
    return {
        "symbols": np.array([a for s in sequences for a in s], np.int32),
        "lengths": np.array([len(s) for s in sequences], np.int32),
    }


def _unpacked(packed: Mapping[str, Any]) -> Iterator[Phrase]:
    symbols, at = packed["symbols"].tolist(), 0
    for length in packed["lengths"].tolist():
        yield tuple(symbols[at : at + length])
        at += length
