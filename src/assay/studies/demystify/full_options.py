"""Options of the full-size protocol, for those who have a model: fields that the study's own options take over.

Nothing here is read at tiny scale. 0 stands for the paper's value of the task (full.PAPER).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.config import Section


class FullOptions(Section):
    """Mixed into the study's options: `class DemystifyOptions(Options, FullOptions)`."""

    model: str = ""
    """Full size: a folder, a hub name or a built-in policy to start from; absent: the tiny scale."""
    task: Literal["quote", "maths"] = "quote"
    """Full size: say one sentence, or count the integer pairs on two lines."""
    reward: Literal["both", "sparse", "dense"] = "both"
    """Full size: which reward to train on."""
    algorithm: Literal["ppo", "grpo"] = "ppo"
    """Full size: PPO with a critic as in the paper, or GRPO with the rollout batch as its group."""
    steps: int = Field(0, ge=0, le=1_000_000)
    """Full size: RL steps; 0: 128 (quote) or 54 (maths)."""
    rollouts: int = Field(0, ge=0, le=9999)
    """Full size: samples of one RL step; 0: 32."""
    epochs: int = Field(4, ge=1, le=100)
    """Full size: optimiser steps on each batch of rollouts. 1 is the reading in which a larger train batch adds them up."""
    sft_steps: int = Field(0, ge=0, le=1_000_000)
    """Full size: optimiser steps of SFT+, and at most of SFT-; 0: 500 (quote) or 24 (maths)."""
    samples: int = Field(0, ge=0, le=1_000_000)
    """Full size: samples of an evaluation; 0: 10000 (quote) or 128 (maths)."""
    max_tokens: int = Field(0, ge=0, le=1_000_000)
    """Full size: tokens of an answer at most; 0: 75 (quote) or 1500 (maths)."""
    learning_rate: float = Field(0.0, ge=0)
    """Full size: AdamW learning rate of RL; 0: 2e-5 (quote) or 5e-5 (maths)."""
    sft_learning_rate: float = Field(0.0, ge=0)
    """Full size: of SFT+ and SFT-; 0: 2e-5 (quote) or 5e-5 (maths)."""
    mask_prompt: bool = False
    """Full size: keep prompt tokens out of the loss of SFT- too. The released code has them in it for the quote task."""
    lines: str = ""
    """Full size, quote: UTF-8 file with one line of film dialogue a line, for the other answers of SFT+; absent: lines of the
    reference of Python's language."""
    judge: str = ""
    """Full size, maths, dense: address of an OpenAI-style endpoint, http://host:port/v1; absent: the strict language."""
    judge_model: str = "Qwen/Qwen2.5-32B-Instruct-AWQ"
    """Full size: the name that the endpoint gives its judge."""
    lora_rank: int = Field(16, ge=0, le=4096)
    """Full size: rank of the adapter (alpha is twice that); 0: train all weights."""
    device: str = "cpu"
    """Full size: torch device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Full size: the weights' type."""
