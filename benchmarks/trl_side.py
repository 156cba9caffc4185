"""TRL's `GRPOTrainer` on the benchmark's environment, run in its own virtual environment by step.py; prints one JSON object.

Settings are those that serve TRL best here: no gradient checkpointing, no reference model, old log-probs not recomputed
(generation is aligned with the optimiser step), no logging. A step lasts from the end of the one before to its own end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from measure import matrix_rate
from world import DIRECTIONS, INSTRUCTIONS, REWARDS, World, goal

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


def environment_class(turns: int) -> type:
    class TrlWorld:
        """TRL's idea of an environment around the same World."""

        steps = 0

        def __init__(self) -> None:
            self.world = World(turns)

        def reset(self, task: int, **row: Any) -> str:
            return self.world.reset(options={"task": task})[0]

        def act(self, word: str) -> str:
            """
            Go somewhere.

            Args:
                word: Where to.

            Returns:
                What is there.
            """
            TrlWorld.steps += 1
            return self.world.step(word)[0]

    return TrlWorld


def reward(completions: list[list[dict[str, Any]]], **rest: Any) -> list[float]:
    """The world's reward of the last answer, which TRL does not execute."""
    last = [completion[-1]["tool_calls"][0]["function"]["arguments"]["word"] for completion in completions]
    return [REWARDS[DIRECTIONS.index(word)] for word in last]


def build(options: argparse.Namespace, out: str) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.response_template = RESPONSE
    tasks = json.loads(options.tasks)
    prompts = [
        [{"role": "system", "content": f"{INSTRUCTIONS}\n{goal(task)}"}, {"role": "user", "content": ""}]
        for task in tasks
    ]
    episodes = options.prompts * options.rollouts
    rows = min(options.rows_per_forward, episodes)
    config = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=episodes // rows,
        num_generations=options.rollouts,
        max_completion_length=32 * options.turns,
        max_tool_calling_iterations=options.turns - 1,
        max_steps=options.warmup + options.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=options.model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "task": tasks}),
        processing_class=tokenizer,
        environment_factory=environment_class(options.turns),
    )


def watch(trainer: Any) -> tuple[list[dict[str, float]], list[tuple[float, float]]]:
    """Counts and seconds of each generation, and (wall, CPU) clocks at the end of each step."""
    from transformers import TrainerCallback

    generations: list[dict[str, float]] = []
    ends: list[tuple[float, float]] = [(time.perf_counter(), time.process_time())]
    generate = trainer._generate

    def counted(prompts: list[Any]) -> Any:
        began = time.perf_counter()
        result = generate(prompts)
        prompt_ids, completion_ids, mask = result[:3]
        calls = sum(len([m for m in c if m["role"] == "assistant"]) for c in result[3])
        generations.append(
            {
                "collect_s": time.perf_counter() - began,
                "episodes": len(completion_ids),
                "turns": calls,
                "sampled_tokens": sum(map(sum, mask)),
                "other_tokens": sum(map(len, prompt_ids)) + sum(len(m) - sum(m) for m in mask),
            }
        )
        return result

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    trainer._generate = counted
    trainer.add_callback(Clock())
    return generations, ends


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", required=True, help="JSON list of task ids, `prompts` for each step")
    for name, default in (("turns", 5), ("prompts", 16), ("rollouts", 8), ("steps", 1), ("warmup", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows-per-forward", type=int, default=64)
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    rate = matrix_rate()
    stdout, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as out:
        trainer = build(options, out)
        generations, ends = watch(trainer)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
    records = []
    for i, counts in enumerate(generations):
        step, cpu = (after - before for before, after in zip(ends[i], ends[i + 1], strict=True))
        records.append({**counts, "step_s": step, "cpu_s": cpu, "update_s": step - counts["collect_s"]})
    print(
        json.dumps(
            {
                "matrix_flops": rate,
                "start_bytes": start * 1024,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "steps": records[options.warmup :],
            }
        ),
        file=stdout,
    )


if __name__ == "__main__":
    main()
