"""What the learner writes: rows that broke an update, and the policy as a folder that is checked by loading it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.files import beside, put, writing
from assay.model import Network, causal, load_model
from assay.protocols import UserError
from assay.rows import Row

PROBE = 16  # tokens of the text that both models read


def save_rows(rows: Sequence[Row], folder: Path, version: int) -> Path:
    """`folder/nonfinite-VERSION.npz`: `keys` [R] text, and per row R "R.ids", "R.at", "R.provenance", "R.COLUMN"; no pickle."""
    path = folder / f"nonfinite-{version:06d}.npz"
    arrays: dict[str, Any] = {"keys": np.array(["/".join(map(str, row.key)) for row in rows])}
    for i, row in enumerate(rows):
        arrays |= {f"{i}.ids": row.ids, f"{i}.at": row.at, f"{i}.provenance": row.provenance}
        arrays |= {f"{i}.{name}": column for name, column in row.columns.items()}
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        with beside(path).open("wb") as file:
            np.savez(file, **arrays)
        put(path)
    return path


def save_pretrained(network: Network, folder: Path) -> None:
    """Writes the model's folder, loads it again and compares logits on a probe, bit for bit; UserError if they differ."""
    model = network.model
    with writing(folder):
        model.save_pretrained(folder, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))
    before = _probe(network)
    if hasattr(model, "peft_config"):
        name = model.active_adapter
        model.load_adapter(str(folder), adapter_name="probe")
        model.set_adapter("probe")
        after = _probe(network)
        model.set_adapter(name)
        model.delete_adapter("probe")
    else:
        loaded: Any = load_model(str(folder), network.dtype)
        after = _probe(Network(loaded.to(network.device)))
    worst = float((before - after).abs().max())
    if worst != 0.0:
        raise UserError(
            f"{folder} was written, but loaded again its logits differ by {worst:.3g} on a probe: do not use it; "
            "the model may share or transform weights in a way that save_pretrained does not keep"
        )


@torch.no_grad()
def _probe(network: Network) -> Tensor:
    """fp32 logits [PROBE, V]."""
    ids = torch.arange(PROBE, device=network.device) * 7919 % network.vocabulary
    return network.logits(network.hidden(ids, torch.arange(PROBE, device=network.device), causal))
