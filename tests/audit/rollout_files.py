"""One small valid file of every format, with the same kind of content: what the frameworks write, in their names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn
from assay.trace_store import write_traces

S, T, E, F = Provenance.SAMPLED, Provenance.TEMPLATE, Provenance.ENVIRONMENT, Provenance.FORCED


def turn(context: list[int], ids: list[int], provenance: list[int], closing: list[int], version: int = 0) -> Turn:
    logprobs = np.array([-i / 10 if p == S else np.nan for i, p in zip(ids, provenance, strict=True)], np.float32)
    return Turn(
        np.array(context, np.int32),
        np.full(len(context), E, np.uint8),
        np.array(ids, np.int32),
        np.array(provenance, np.uint8),
        logprobs,
        np.zeros(len(ids), np.float32),
        np.array(closing, np.int32),
        *("you see", "go", 0.0, True, "anchor", "go", False),
        policy_version=version,
    )


def trace(slot: int = 0, rollout: int = 0, step: int = 4, turns: tuple[Turn, ...] | None = None, **more: Any) -> Trace:
    if turns is None:
        turns = (turn([10], [11, 12], [S, S], [13]), turn([14, 15], [16, 17, 18], [S, S, F], [19], version=2))
    fields: dict[str, Any] = {"reward": 1.0, "outcome": Outcome.SUCCESS, "temperature": 0.9} | more
    return Trace(
        TaskKey("grid", "v1", "train" if step >= 0 else "iid", slot, f"hash{slot}"),
        step,
        0,
        slot,
        rollout,
        np.array([1, 2], np.int32),
        np.array([T, T], np.uint8),
        turns,
        "the end",
        **fields,
    )


def ours(folder: Path) -> Path:
    path = folder / "traces.parquet"
    write_traces(path, [trace(0, 0), trace(0, 1, reward=0.0, outcome=Outcome.FAILURE), trace(1, 0, turns=())])
    return path


def node(parent: int | None, role: str, text: str, ids: list[int], **more: Any) -> dict[str, Any]:
    message = {"role": role, "content": text}
    plain = {"parent": parent, "message": message, "sampled": False, "timestamp": 1.5, "token_ids": ids}
    return {**plain, "mask": [False] * len(ids), "is_content": [True] * len(ids), "logprobs": [], **more}


def verifiers_trace() -> dict[str, Any]:
    """Two branches: the conversation went on from node 2 in two ways (nodes 3 and 4)."""
    answer = {"sampled": True, "mask": [False, True, True], "logprobs": [-0.5, -0.25], "advantages": [1.0, 2.0]}
    other = {"sampled": True, "mask": [False, True], "logprobs": [-0.125], "loss_weights": {"rl": [0.0, 0.5]}}
    nodes = [
        node(None, "system", "play", [1, 2]),
        node(0, "user", "you see", [3]),
        node(1, "assistant", "go", [4, 5, 6], **answer),
        node(2, "tool", "you went", [7]),
        node(2, "assistant", "stay", [8, 9], **other),
    ]
    return {
        "version": 1,
        "id": "t1",
        "task": {"type": "Grid", "data": {"idx": 3, "answer": "42"}, "key": "grid-3"},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": nodes,
        "calls": [{"node": 2, "finish_reason": "tool_calls"}, {"node": 4, "finish_reason": "length"}],
        "rewards": {"won": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.5, "weight": 1.0}, "late": None},
        "stop_condition": "agent_completed",
        "errors": [],
        "ok": True,
    }


def verifiers_episode(**more: Any) -> dict[str, Any]:
    task = {"type": "Grid", "data": {"idx": 3}, "key": "grid-3"}
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 7, "policy": {"start": 5, "end": 6}}}
    episode = {"id": "e1", "env": {"id": "grid"}, "task": task, "group": {"id": "g1"}, "run": run, "ok": True}
    return {**episode, "errors": [], "traces": [verifiers_trace()], **more}


def verifiers(folder: Path) -> Path:
    path = folder / "traces.jsonl"
    failed = {
        **verifiers_trace(),
        "id": "t2",
        "rewards": {"won": None},
        "errors": [{"type": "ToolError", "message": "down"}],
    }
    path.write_text(json_lines(verifiers_episode(), verifiers_episode(id="e2", traces=[failed])))
    return path


def verifiers_v0(folder: Path) -> Path:
    path = folder / "results.jsonl"
    tokens = {"prompt_ids": [1, 2], "prompt_mask": [0, 0], "completion_ids": [3, 4], "completion_mask": [1, 0]}
    tokens |= {"completion_logprobs": [-0.5, -1.0], "is_truncated": False}
    said = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
    plain = {
        "example_id": 7,
        "answer": "4",
        "reward": 1.0,
        "is_truncated": False,
        "stop_condition": "max_turns_reached",
        **said,
    }
    longer = {
        "prompt_ids": [1, 2, 3, 4, 5],
        "completion_ids": [6],
        "completion_mask": [1],
        "completion_logprobs": [-2.0],
    }
    steps = [{**said, "tokens": tokens, "advantage": 0.5}, {**said, "tokens": longer, "advantage": None}]
    error = {"error": "ToolError", "error_chain_repr": "", "error_chain_str": ""}
    path.write_text(json_lines(plain, {**plain, "trajectory": steps}, {**plain, "reward": None, "error": error}))
    return path


def verl_tensors() -> dict[str, np.ndarray]:
    """Two rows of P=3, R=4: [. 1 2 | 3 4 5 .] and [6 7 8 | 9 10 . .]; the tool wrote token 4."""
    responses = np.array([[3, 4, 5, 0], [9, 10, 0, 0]], np.int64)
    prompts = np.array([[0, 1, 2], [6, 7, 8]], np.int64)
    return {
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "prompts": prompts,
        "responses": responses,
        "attention_mask": np.array([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0]], np.int64),
        "response_mask": np.array([[1, 0, 1, 0], [1, 1, 0, 0]], np.int64),
        "old_log_probs": np.array([[-1, -2, -3, 0], [-4, -5, 0, 0]], np.float32),
        "rollout_log_probs": np.array([[-1.5, 0, -3.5, 0], [-4.5, -5.5, 0, 0]], np.float32),
        "advantages": np.array([[0.5, 0.5, 0.5, 0], [-0.5, -0.5, 0, 0]], np.float32),
        "token_level_scores": np.array([[0, 0, 1, 0], [0, 0.25, 0, 0]], np.float32),
        "token_level_rewards": np.array([[-0.1, 0, 0.9, 0], [0, 0.25, 0, 0]], np.float32),
    }


def verl_facts() -> dict[str, Any]:
    return {
        "uid": ["u1", "u1"],
        "data_source": ["grid", "grid"],
        "reward_model": [{"style": "rule", "ground_truth": "42"}, {"style": "rule", "ground_truth": "43"}],
        "extra_info": [{"index": 0, "split": "train"}, {"index": 1, "split": "train"}],
        "meta_info": {"temperature": 0.7, "eos_token_id": 5},
    }


def verl(folder: Path) -> Path:
    path = folder / "batch.safetensors"
    save_file(verl_tensors(), path, {name: json.dumps(value) for name, value in verl_facts().items()})
    return path


def verl_npz(folder: Path) -> Path:
    path = folder / "batch.npz"
    np.savez_compressed(path, uid=np.array(["u1", "u2"]), **verl_tensors())
    return path


def verl_dump(folder: Path) -> Path:
    path = folder / "12.jsonl"
    line = {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 12, "acc": True}
    path.write_text(json_lines({**line, "uid": "q_0_0"}, {**line, "score": float("nan"), "uid": "q_1_0"}))
    return path


def trl_table() -> pa.Table:
    prompt = [{"role": "user", "content": "2+2?"}]
    return pa.table(
        {
            "step": [1, 1, 1, 1],
            "prompt": [prompt, prompt, prompt[:1] * 2, prompt[:1] * 2],
            "completion": [[{"role": "assistant", "content": text}] for text in "4567"],
            "right": [1.0, 0.0, 1.0, None],
            "short": [0.5, 0.5, float("nan"), None],
            "answer": ["4"] * 4,
            "advantage": [0.7, -0.7, 0.0, 0.0],
        }
    )


def trl(folder: Path) -> Path:
    path = folder / "completions_00001.parquet"
    pq.write_table(trl_table(), path)
    return path


def trl_rollout(folder: Path) -> Path:
    path = folder / "rollout.jsonl"
    batch = {"prompt_ids": [[1, 2], [1, 2]], "completion_ids": [[3, 4], [5]], "logprobs": [[-0.5, 0.0], [[-1.0]]]}
    path.write_text(
        json_lines({**batch, "env_mask": [[1, 0], [1]], "rewards": [1.0, 0.0], "advantages": [0.5, [-0.5]]})
    )
    return path


def skyrl_batch() -> dict[str, Any]:
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4], [7]],
        "response_ids": [[3], [5, 6], [8, 9]],
        "rewards": [[0.0], [0.25, 0.5], [1.0, 0.0]],
        "loss_masks": [[1], [1, 0], [1, 1]],
        "stop_reasons": ["stop", "length", "stop"],
        "rollout_metrics": {"x": 1},
        "rollout_logprobs": [[-1.0], [-2.0, -3.0], [-4.0, -5.0]],
        "trajectory_ids": [
            {"instance_id": "a", "repetition_id": 0},
            {"instance_id": "a", "repetition_id": 0},
            {"instance_id": "b", "repetition_id": 1},
        ],
        "is_last_step": [False, True, True],
    }


def skyrl(folder: Path) -> Path:
    path = folder / "generator_output.json"
    path.write_text(json.dumps(skyrl_batch(), indent=1))
    return path


def skyrl_npz(folder: Path) -> Path:
    path = folder / "generator_output.npz"
    np.savez(
        path,
        prompt_token_ids=np.array([[1, 2, -1, -1], [1, 2, 3, 4]]),
        response_ids=np.array([[3, -1], [5, 6]]),
        loss_masks=np.array([[1, 0], [1, 0]]),
        rewards=np.array([0.0, 0.75]),
        stop_reasons=np.array(["stop", "length"]),
    )
    return path


def openai(folder: Path) -> Path:
    path = folder / "chat.jsonl"
    content = [{"token": "token_id:8", "logprob": -0.5, "top_logprobs": []}, {"token": "token_id:9", "logprob": -1.5}]
    choices = [
        {"message": {"role": "assistant", "content": "four"}, "token_ids": [8, 9], "logprobs": {"content": content}},
        {
            "message": {"role": "assistant", "content": "4"},
            "logprobs": {"content": content[:1]},
            "finish_reason": "length",
        },
    ]
    chat = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    flat = {"id": "c1", "messages": chat, "prompt_token_ids": [1, 2], "choices": choices, "reward": 1.0, "top_p": 0.9}
    nested = {
        "request": {"messages": chat, "top_p": 0.9},
        "response": {"prompt_token_ids": [1], "choices": choices[:1]},
    }
    path.write_text(json_lines(flat, nested))
    return path


def json_lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


WRITERS = {  # name -> (writer, the format it must be recognised as)
    "ours": (ours, "assay"),
    "verifiers": (verifiers, "verifiers"),
    "verifiers-v0": (verifiers_v0, "verifiers-v0"),
    "verl": (verl, "verl"),
    "verl npz": (verl_npz, "verl"),
    "verl dump": (verl_dump, "verl"),
    "trl": (trl, "trl"),
    "trl rollout": (trl_rollout, "trl"),
    "skyrl": (skyrl, "skyrl"),
    "skyrl npz": (skyrl_npz, "skyrl"),
    "openai": (openai, "openai"),
}
