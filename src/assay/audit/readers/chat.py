"""OpenAI-style logs with token ids, as vLLM and SGLang give them: one request with its answer a line.

Ids come from prompt_token_ids and choices[].token_ids (vLLM's return_token_ids), or from log-prob entries whose token is
written "token_id:123" (return_tokens_as_token_ids). Request and response may lie flat in one object or under `request` and
`response`. Each choice is a sample. Such a log does not say what is trained on: there is a mask only if a choice has
`loss_mask`. `reward`, `group` and `advantage` are read where somebody added them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.audit.readers.collect import Collector, Record, as_floats, content, joined, messages, refuse, spread
from assay.audit.readers.files import Progress, kind_of
from assay.audit.readers.records import records

ID = "token_id:"
SAMPLING = ("temperature", "top_p", "top_k")
COLUMNS = (
    *("request", "response", "messages", "prompt_token_ids", "choices", "id", "model", "task", "split", "error"),
    *("reward", "group", "rollout", "turn", "advantage", *SAMPLING),
)


def read(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """Chat logs: a sample per choice, its prompt from messages or ids, its tokens from ids or "token_id:N" texts."""
    sampling: dict[str, set[float | None]] = {name: set() for name in SAMPLING}
    for path in files:
        prefix = f"{path.name}, " if len(files) > 1 else ""
        for where, record in records(path, kind_of(path), COLUMNS, progress):
            request, response = record.sub("request") or record, record.sub("response") or record
            for name in SAMPLING:
                sampling[name].add(request.number(name))
            choices = response.subs("choices")
            if "choices" not in response and "error" not in record:
                refuse(record.place, "choices", "the choices of a response", None)
            for i, choice in enumerate(choices):
                place = prefix + (where if len(choices) == 1 else f"{where}, choice {i}")
                _choice(choice, record, request, response, place, into)
            if into.full:
                break
    into.declare(**{name: next(iter(values)) for name, values in sampling.items() if len(values) == 1})


def _choice(choice: Record, record: Record, request: Record, response: Record, where: str, into: Collector) -> None:
    prompt = messages(request.values.get("messages") or [], request.place, "messages")
    message = choice.sub("message")
    text = content(message.values, choice.place, "message") if message else choice.text("text")
    tokens = _tokens(choice, record, response)
    task = record.name("task")
    samples = {
        "reward": _first(choice, record).number("reward"),
        "group": record.name("group"),
        "task": task,
        "split": record.text("split"),
        "rollout": record.name("rollout") or response.name("id"),
        "turn": record.integer("turn"),
        "stop": choice.text("finish_reason"),
        "error": record.text("error"),
    }
    answer = [] if text is None else [{"role": "assistant", "content": text}]
    texts = {"messages": prompt + answer, "prompt": joined(prompt), "completion": text}
    into.add(where, tokens, samples, texts, choice.place)


def _first(choice: Record, record: Record) -> Record:
    return choice if "reward" in choice else record


def _tokens(choice: Record, record: Record, response: Record) -> dict[str, Any]:
    source = next((r for r in (response, choice, record) if "prompt_token_ids" in r), None)
    prompt = source.ints("prompt_token_ids") if source else None
    logprobs = choice.sub("logprobs")
    entries = logprobs.subs("content") if logprobs else []
    ids = choice.ints("token_ids")
    if ids is None:
        ids = _written_ids(entries)
    if ids is None or prompt is None:
        return {}
    answer = np.arange(len(prompt) + len(ids)) >= len(prompt)
    tokens: dict[str, Any] = {"ids": np.concatenate([prompt, ids]), "sampled": answer}
    if entries:
        values = as_floats([entry.number("logprob") for entry in entries], choice.place, "logprobs")
        tokens["logprobs"] = spread(values, answer, choice.place, "logprobs.content")
    mask = choice.flags("loss_mask")
    if mask is not None:
        tokens["mask"] = np.concatenate([np.zeros(len(prompt), np.bool_), mask])
    credit = (choice if "advantage" in choice else record).number("advantage")
    if credit is not None:
        tokens["advantages"] = np.where(answer, np.float32(credit), np.float32(np.nan))
    return tokens


def _written_ids(entries: Sequence[Record]) -> Any:
    """Ids written as "token_id:123"; None where the tokens are texts."""
    texts = [entry.text("token") or "" for entry in entries]
    if not texts or not all(text.startswith(ID) for text in texts):
        return None
    found = []
    for entry, text in zip(entries, texts, strict=True):
        number = text.removeprefix(ID)
        if not (number.isdecimal() and number.isascii() and len(number) < 11 and int(number) < 2**31):
            refuse(entry.place, "token", "token_id: and a token id", text)
        found.append(int(number))
    return np.array(found, np.int32)
