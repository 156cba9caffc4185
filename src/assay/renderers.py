"""From text to token ids and back, once: a model's own chat template, cut into pieces that can be spliced.

The template is rendered on a dummy conversation whose texts are markers, and cut at the markers. What stands between two
markers is the fixed piece that belongs there. An episode is then a concatenation of pieces; nothing that was sampled is
ever decoded and encoded again. A template whose pieces change with what follows (one that rewrites history) cannot be
spliced and is refused by name. Text of the environment can never become a control token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from assay.protocols import UserError
from assay.trace import Ids, Provenance

MARKS = ["@goal@", "@seen0@", "@said0@", "@seen1@", "@said1@", "@seen2@", "@said2@"]
REMEMBERED = 1 << 12  # texts whose ids are kept: about 2 MB
THINKING = ("off", "keep")


class Pieces(NamedTuple):
    """The fixed texts of a conversation."""

    start: str  # before the goal
    opening: str  # between the goal and the first observation
    header: str  # between an observation and its answer, as `add_generation_prompt` writes it
    lead: str  # what history has between that header and the answer's text: a space, or nothing
    between: str  # between an answer and the next observation


class _Moved(Exception):
    """A template that writes the system message elsewhere than at the start."""


class ChatRenderer:
    """Prompt, template, stops and limits of one environment for one model (protocols.Renderer).

    `instructions` say how to act, `modes` are texts that are put before them. `thinking`: "off" asks the template for
    answers without a thinking block; "keep" lets the policy think and keeps the block in the context of later turns (ids
    are spliced, whatever the template would strip).
    """

    def __init__(
        self, tokenizer: Any, instructions: str, modes: Mapping[str, str] | None = None, thinking: str = "off"
    ) -> None:
        if thinking not in THINKING:
            raise UserError(f"thinking is 'off' or 'keep', not {thinking!r}")
        if not tokenizer.chat_template:
            raise UserError(
                f"model {tokenizer.name_or_path!r} has no chat template: put a chat_template.jinja into its folder, "
                "or use an instruction-tuned model"
            )
        self.tokenizer, self.instructions, self.thinking = tokenizer, instructions, thinking
        self.modes = dict(modes or {})
        self._encoded: dict[tuple[str, bool], Ids] = {}
        self._cache: dict[str, Pieces] = {}
        texts = self._pieces("")
        self.header, self._lead = self._encode(texts.header), texts.lead
        self._thinks = texts.header.rfind("<think>") > texts.header.rfind("</think>")  # answers begin inside a block
        if self._thinks and thinking == "off":
            raise UserError(
                f"the chat template of {tokenizer.name_or_path!r} opens a thinking block in every answer: "
                "use thinking = 'keep', with a max_turn_tokens that a thought fits into"
            )
        closing, opening = _split_closing(texts.between, tokenizer)
        self._closing, self._opening = self._encode(closing), self._encode(opening)
        self._opening_text = opening
        self.windows = texts.opening.endswith(opening)  # the prompt is a message of its own: any turn can follow it
        self.stop_ids = _stop_ids(tokenizer, self._closing)
        self.stop_strings: tuple[str, ...] = ()

    def prompt(self, goal: str, mode: str = "") -> tuple[Ids, NDArray[np.uint8]]:
        """The fixed prompt: (ids, provenance)."""
        texts = self._pieces(mode)
        end = texts.opening.removesuffix(self._opening_text) if self.windows else texts.opening
        parts = [(texts.start, Provenance.TEMPLATE), (goal, Provenance.ENVIRONMENT), (end, Provenance.TEMPLATE)]
        return self._join(parts)

    def observation(self, text: str, first: bool) -> tuple[Ids, NDArray[np.uint8]]:
        """An observation up to and including the header of the answer: (ids, provenance)."""
        opening = self._opening if self.windows or not first else np.zeros(0, np.int32)
        seen = self._encode(text, plain=True)
        ids = np.concatenate([opening, seen, self.header]).astype(np.int32)
        provenance = np.full(len(ids), Provenance.TEMPLATE, np.uint8)
        provenance[len(opening) : len(opening) + len(seen)] = Provenance.ENVIRONMENT
        return ids, provenance

    def closing(self, ids: Ids) -> Ids:
        """Template after an answer; what the policy sampled of it itself (its end token) is not repeated."""
        if len(ids) and len(self._closing) and ids[-1] == self._closing[0]:
            return self._closing[1:]
        if len(ids) and ids[-1] in self.stop_ids:  # another end token than the template's
            return self._closing[1:]
        return self._closing

    def action(self, ids: Ids) -> str:
        """The text to execute: without end token and thinking block."""
        if len(ids) and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        if "</think>" in text:
            text = text.rpartition("</think>")[2]
        elif self._thinks or text.lstrip().startswith("<think>"):  # cut off while it was thinking: it did not act
            text = ""
        return text.strip()

    def answer(self, action: str) -> Ids:
        """Ids of an answer that code gives (a demonstration), with the template's end token."""
        return np.concatenate([self._encode(self._lead + action, plain=True), self._closing[:1]]).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _join(self, parts: list[tuple[str, Provenance]]) -> tuple[Ids, NDArray[np.uint8]]:
        ids = [self._encode(text, plain=source is Provenance.ENVIRONMENT) for text, source in parts]
        provenance = [np.full(len(i), source, np.uint8) for i, (_, source) in zip(ids, parts, strict=True)]
        return np.concatenate(ids).astype(np.int32), np.concatenate(provenance)

    def _encode(self, text: str, plain: bool = False) -> Ids:
        """`plain`: control tokens written out in the text stay text. Texts come again and again: they are remembered."""
        known = self._encoded.get((text, plain))
        if known is None:
            if len(self._encoded) >= REMEMBERED:
                self._encoded.clear()
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain) if text else []
            known = self._encoded[text, plain] = np.asarray(ids, np.int32)
            known.setflags(write=False)
        return known

    def _pieces(self, mode: str) -> Pieces:
        if mode not in self._cache:
            if mode and mode not in self.modes:
                raise UserError(f"prompt mode {mode!r} does not exist: there are {sorted(self.modes)}")
            self._cache[mode] = self._render("\n\n".join(t for t in (self.modes.get(mode, ""), self.instructions) if t))
        return self._cache[mode]

    def _render(self, instructions: str) -> Pieces:
        goal, turns = MARKS[0], MARKS[1:]
        task = f"{instructions}\n{goal}" if instructions else goal
        messages = [{"role": "system", "content": task}]
        messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        merged = [{"role": "user", "content": f"{task}\n\n{turns[0]}"}, *messages[2:]]
        try:
            return self._template(messages)
        except (TemplateError, _Moved):  # no system role, or one that wanders: the task opens the first user message
            pass
        try:
            return self._template(merged)
        except (TemplateError, _Moved) as error:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot be spliced exactly: {error}"
            ) from error

    def _template(self, messages: list[dict[str, str]]) -> Pieces:
        """The conversation cut at the markers."""
        options = {"tokenize": False, "enable_thinking": self.thinking == "keep"}
        name = self.tokenizer.name_or_path
        text: str = self.tokenizer.apply_chat_template(messages, **options)
        for mark in MARKS:
            if text.count(mark) != 1:
                raise UserError(
                    f"the chat template of {name!r} drops or repeats messages: it cannot be spliced exactly"
                )
        if sorted(MARKS, key=text.index) != MARKS:
            raise _Moved("it writes messages in another order")
        pieces = _cut(text)
        if pieces[3] != pieces[5]:
            raise UserError(f"the chat template of {name!r} rewrites earlier turns: it cannot be spliced exactly")
        asked: str = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        header = asked.partition(MARKS[5])[2]
        lead = pieces[2].removeprefix(header) if pieces[2].startswith(header) else ""
        return Pieces(pieces[0], pieces[1], header, lead, pieces[3])


def _cut(text: str) -> list[str]:
    """The pieces around MARKS, in order: len(MARKS) + 1 of them."""
    pieces = []
    for mark in MARKS:
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _split_closing(between: str, tokenizer: Any) -> tuple[str, str]:
    """What ends an answer, and what opens the next user message. The cut is after the first control token and the white
    space behind it."""
    specials = sorted((t for t in tokenizer.all_special_tokens if t in between), key=between.index)
    added = [str(t) for t in tokenizer.added_tokens_decoder.values() if str(t) in between]
    ends = sorted({*specials, *added}, key=lambda t: (between.index(t), -len(t)))
    if not ends or between[: between.index(ends[0])].strip():
        raise UserError(
            f"the chat template of {tokenizer.name_or_path!r} does not end an answer with a control token: "
            "where an answer stops cannot be told exactly"
        )
    cut = between.index(ends[0]) + len(ends[0])
    while cut < len(between) and between[cut].isspace():
        cut += 1
    return between[:cut].lstrip(), between[cut:]


def _stop_ids(tokenizer: Any, closing: Ids) -> tuple[int, ...]:
    stops = {int(closing[0])} if len(closing) else set()
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    return tuple(sorted(stops))
