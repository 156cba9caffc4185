"""verifiers and prime-rl: traces.jsonl (v1: one episode or trace a line, a graph of messages) and results of v0.

v1: a node holds the tokens that it adds; log-probs and credit are compact, one per sampled token. Each path from a root
to a leaf is one training sample. What was sampled is taken from the extent of a node's log-probs (a sampled node is
scaffold, then the answer), so that `mask` can be checked against it. v0: each step of a trajectory, where its tokens were
saved, is one sample; without them a rollout is one sample of texts.
Source: the files that verifiers 0.4 and 0.1.14 write.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.audit.readers.collect import Collector, Record, as_floats, content, joined, messages, refuse, spread
from assay.audit.readers.files import Progress, kind_of
from assay.audit.readers.records import records
from assay.trace import Outcome

COMPACT = {"logprobs": "logprobs", "trainer_logprobs": "trainer_logprobs", "advantages": "advantages"}
CUT = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed", "prompt_too_long")
REPEATS = 64  # times that the tokens of one trace may stand in its branches, beyond the first MANY
MANY = 1 << 20
LOSS = "rl"  # prime-rl's name for the stream of the policy loss


def read_v1(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """traces.jsonl: a sample per branch of a trace."""
    for path in files:
        for where, record in records(path, kind_of(path), None, progress):
            if "nodes" in record:
                _trace(record, record, where, into)
            elif "traces" not in record:
                refuse(record.place, "nodes", "nodes, or traces with nodes", None)
            else:
                if not record.items("traces"):  # an episode that failed before its first trace
                    into.declared["episodes_without_traces"] = into.declared.get("episodes_without_traces", 0) + 1
                for i, trace in enumerate(record.subs("traces")):
                    _trace(trace, record, where if len(record.values["traces"]) == 1 else f"{where}, trace {i}", into)
            if into.full:
                return


def _trace(trace: Record, episode: Record, where: str, into: Collector) -> None:
    nodes = trace.subs("nodes")
    paths, attempts = _paths(nodes)
    parts = [_node(node) for node in nodes]
    own = sum(len(part["ids"]) for part in parts)
    repeated = sum(len(parts[n]["ids"]) for path in paths for n in path)
    if repeated > max(MANY, REPEATS * own):
        refuse(trace.place, "nodes", f"branches that repeat {own} tokens at most {REPEATS} times", f"{repeated} tokens")
    facts = _facts(trace, episode, nodes)
    agent = trace.sub("agent")
    trained = agent is None or agent.truth("trainable") is not False
    for index, path in enumerate(paths):
        tokens = _joined([parts[n] for n in path])
        if tokens and not (trained and path[-1] not in attempts):
            tokens["mask"] = np.zeros(len(tokens["ids"]), np.bool_)
        samples = {**facts, "turn": index if len(paths) > 1 else -1}
        texts = _texts([nodes[n] for n in path], trace)
        into.add(where if len(paths) == 1 else f"{where}, branch {index}", tokens, samples, texts, trace.place)


def _paths(nodes: Sequence[Record]) -> tuple[list[list[int]], set[int]]:
    """Root-to-leaf paths in order of their leaves, and leaves that are compaction attempts nobody went on from."""
    parents = [node.integer("parent") for node in nodes]
    for i, parent in enumerate(parents):
        if parent is not None and not 0 <= parent < i:
            refuse(
                nodes[i].place, "parent", f"an earlier node, 0 to {i - 1}" if i else "null in the first node", parent
            )
    depth = [0] * len(nodes)
    for i, parent in enumerate(parents):
        depth[i] = 1 + (depth[parent] if parent is not None else 0)
    leaves = sorted(set(range(len(nodes))) - set(parents))
    if sum(depth[leaf] for leaf in leaves) > REPEATS * max(MANY >> 6, len(nodes)):
        refuse(nodes[0].place, "parent", "a graph with fewer branches", f"{len(leaves)} of them")
    paths: list[list[int]] = []
    for leaf in leaves:
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        paths.append(path[::-1])
    links = [(i, link) for i, node in enumerate(nodes) for link in node.subs("semantic_parents")]
    accepted = {link.integer("node") for _, link in links if link.text("type") == "compaction"}
    return paths, {i for i, link in links if link.text("type") == "compaction_attempt"} - accepted


def _node(node: Record) -> dict[str, Any]:
    """Token columns of one node; "sampled" is None where the node does not say which tokens were."""
    ids = node.needed("token_ids") if "token_ids" in node else np.zeros(0, np.int32)
    told = node.flags("mask")
    mask = np.zeros(len(ids), np.bool_) if told is None or not len(told) else told
    if len(mask) != len(ids):
        refuse(node.place, "mask", f"one value per token of token_ids, {len(ids)} of them", f"{len(mask)} values")
    part: dict[str, Any] = {"ids": ids, "mask": mask, "sampled": np.zeros(len(ids), np.bool_)}
    logprobs = node.floats("logprobs")
    count = 0 if logprobs is None else len(logprobs)
    if count > len(ids):
        refuse(node.place, "logprobs", f"at most one per token, {len(ids)} of them", f"{count} values")
    if node.truth("sampled"):
        part["sampled"][len(ids) - count :] = True
        if not count and len(ids):
            part["sampled"] = None
    for column, name in COMPACT.items():
        values = node.floats(name)
        if values is not None and len(values):
            at = part["sampled"] if part["sampled"] is not None and len(values) == count else mask
            part[column] = spread(values, at, node.place, name)
    weights = node.sub("loss_weights")
    if weights is not None and LOSS in weights:
        part["weights"] = as_floats(weights.values[LOSS], weights.place, LOSS)
        if len(part["weights"]) != len(ids):
            refuse(weights.place, LOSS, f"one value per token, {len(ids)} of them", f"{len(part['weights'])} values")
    return part


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of one path; {} if it has no tokens (relays of evaluations store texts only)."""
    ids = np.concatenate([part["ids"] for part in parts])
    if not len(ids):
        return {}
    tokens: dict[str, Any] = {"ids": ids, "mask": np.concatenate([part["mask"] for part in parts])}
    known = all(part["sampled"] is not None for part in parts)
    tokens["sampled"] = np.concatenate([part["sampled"] for part in parts]) if known else None
    for column in (*COMPACT, "weights"):
        if any(column in part for part in parts):
            tokens[column] = np.concatenate([part.get(column, _silent(part, column)) for part in parts])
    return tokens


def _silent(part: dict[str, Any], column: str) -> NDArray[np.float32]:
    """What a node without a column says on a path where others have it: credit and weights that nobody assigned are read
    as 0 by the trainer, a log-prob is not known."""
    blank = np.full(len(part["ids"]), 0.0 if column == "weights" else np.nan, np.float32)
    if column == "advantages":
        blank[part["mask"]] = 0.0
    return blank


def _facts(trace: Record, episode: Record, nodes: Sequence[Record]) -> dict[str, Any]:
    task = trace.sub("task") or episode.sub("task") or Record({}, trace.place)
    data = task.sub("data") or task
    key = task.name("key") or task.name("hash") or data.name("id") or data.name("idx")
    group, run = episode.sub("group"), episode.sub("run")
    work = run.sub("work") if run else None
    policy = work.sub("policy") if work else None
    stop = trace.text("stop_condition")
    finish = [reason for call in trace.subs("calls") if (reason := call.text("finish_reason"))]
    errors = trace.subs("errors") or (episode.subs("errors") if episode is not trace else [])
    outcome = Outcome.HORIZON if stop == "max_turns" else Outcome.CUT if stop in CUT else None
    return {
        "reward": _reward(trace),
        "group": (group.name("id") if group else None) or key,
        "task": key,
        "split": work.text("type") if work else (run.text("type") if run else None),
        "rollout": trace.name("id") or trace.place,
        "outcome": Outcome.ENVIRONMENT_ERROR.value if errors else outcome and outcome.value,
        "stop": "length" if finish and finish[-1] == "length" else (finish[-1] if finish else stop),
        "error": "; ".join(f"{e.text('type')}: {e.text('message')}" for e in errors[-1:]),
        "version": policy.integer("start") if policy else None,
    }


def _reward(trace: Record) -> float | None:
    """The weighted sum of named rewards; None while none of them was scored."""
    rewards = trace.sub("rewards")
    if rewards is None:
        return trace.number("reward")
    found = []
    for name in rewards.values:
        if isinstance(rewards.values[name], dict):
            reward = rewards.sub(name)
            assert reward is not None
            weight = reward.number("weight")
            found.append((reward.number("score") or 0.0) * (1.0 if weight is None else weight))
        elif name in rewards:
            found.append(rewards.number(name) or 0.0)
    return sum(found) if found else None


def _texts(nodes: Sequence[Record], trace: Record) -> dict[str, Any]:
    chat, sampled = [], []
    for node in nodes:
        message = node.sub("message")
        if message is None or not isinstance(message.values.get("role"), str):
            refuse(node.place, "message", "a message with a role", node.values.get("message"))
        chat.append({"role": message.values["role"], "content": content(message.values, node.place, "message")})
        sampled.append(bool(node.truth("sampled")))
    first = sampled.index(True) if True in sampled else len(chat)
    answers = [message for message, own in zip(chat, sampled, strict=True) if own]
    task = trace.sub("task")
    data = task.sub("data") if task else None
    gold = data.values.get("answer") if data else None
    return {
        "messages": chat,
        "prompt": joined(chat[:first]),
        "completion": joined(answers),
        "gold": gold if isinstance(gold, str) and gold else None,
    }


# ----------------------------------------------------------------------------------------------------------------- v0


def read_v0(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """results.jsonl: a sample per step whose tokens are there, else one per result."""
    for path in files:
        for where, record in records(path, kind_of(path), None, progress):
            steps = record.subs("trajectory")
            told = [(step, tokens) for step in steps if (tokens := step.sub("tokens"))]
            facts, texts = _facts_v0(record), _texts_v0(record)
            if "completion_ids" in record:
                told = [(record, record)]
            if not told and "completion" not in record and not facts["outcome"]:
                refuse(record.place, "completion", "a completion, or tokens in trajectory", None)
            if not told:
                into.add(where, {}, facts, texts, record.place)
            for i, (step, tokens) in enumerate(told):
                samples = {**facts, "turn": i if len(told) > 1 else -1}
                if len(told) > 1:
                    texts = {**texts, **_texts_v0(step)}
                place = where if len(told) == 1 else f"{where}, step {i}"
                into.add(place, _tokens_v0(tokens, step), samples, texts, tokens.place)
            if into.full:
                return


def _tokens_v0(tokens: Record, step: Record) -> dict[str, Any]:
    prompt, completion = tokens.needed("prompt_ids"), tokens.needed("completion_ids")
    columns: dict[str, Any] = {
        "ids": np.concatenate([prompt, completion]),
        "sampled": np.arange(len(prompt) + len(completion)) >= len(prompt),
    }
    mask = tokens.flags("completion_mask")
    if mask is not None:
        before = tokens.flags("prompt_mask")
        columns["mask"] = np.concatenate([np.zeros(len(prompt), np.bool_) if before is None else before, mask])
    for column, name in {"logprobs": "completion_logprobs", "advantages": "completion_advantages"}.items():
        values = tokens.floats(name)
        if values is not None and len(values):
            columns[column] = spread(values, columns["sampled"], tokens.place, name)
    if "advantages" not in columns and (advantage := step.number("advantage")) is not None:
        columns["advantages"] = np.where(columns["sampled"], np.float32(advantage), np.float32(np.nan))
    return columns


def _facts_v0(record: Record) -> dict[str, Any]:
    error, stop = record.values.get("error"), record.text("stop_condition")
    kind = error.get("error") if isinstance(error, dict) else error
    truncated = record.truth("is_truncated")
    example = record.name("example_id")
    horizon = isinstance(stop, str) and stop.startswith("max_turns")
    outcome = Outcome.ENVIRONMENT_ERROR if kind else Outcome.HORIZON if horizon else Outcome.CUT if truncated else None
    return {
        "reward": record.number("reward"),
        "group": example,
        "task": None if example is None else f"{_name(record.values.get('task'))}{example}",
        "rollout": record.place.rpartition("/")[2],
        "outcome": outcome and outcome.value,
        "stop": "length" if truncated else stop,
        "error": str(kind)[:500] if kind else "",
    }


def _name(task: Any) -> str:
    return f"{task}/" if isinstance(task, str) and task else ""


def _texts_v0(record: Record) -> dict[str, Any]:
    prompt = messages(record.values["prompt"], record.place, "prompt") if "prompt" in record else []
    completion = messages(record.values["completion"], record.place, "completion") if "completion" in record else []
    if isinstance(record.values.get("completion"), str):
        completion = [{"role": "assistant", "content": completion[0]["content"]}]
    gold = record.values.get("answer")
    found: dict[str, Any] = {"prompt": joined(prompt), "completion": joined(completion, "assistant")}
    if prompt or completion:
        found["messages"] = prompt + completion
    return found | ({"gold": gold} if isinstance(gold, str) and gold else {})
