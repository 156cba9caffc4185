"""Scores, saving and resuming, refusals: what the learner promises beside its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_parts import model, rows_of, traces
from safetensors.torch import load_file, save_file

from assay.learner.torch_learner import TorchLearner
from assay.model import Network
from assay.protocols import UserError
from assay.rows import Row, Stream
from assay.schedules import linear


def build(built: Any, **options: Any) -> TorchLearner:
    return TorchLearner(Network(built), learning_rate=1e-2, **options)


def policy(rows: list[Row], **constants: Any) -> Stream:
    return Stream("policy", rows, "policy:ppo", "token", constants)


def weights(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in learner.parameters.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_scores_are_those_of_the_model_s_own_forward(name: str) -> None:
    built = model(name)
    theirs = model(name)  # apart: the backend takes over an unfused model's attention
    rows = rows_of(traces(), "window(1)")
    build(built, tokens_per_forward=64).score(rows, frozenset({"old_logprob", "entropy", "target:full"}))
    for row in rows:
        logits = theirs(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0, row.at - 1].detach()
        full = logits.double().log_softmax(-1).numpy()
        np.testing.assert_allclose(row.columns["old_logprob"], full[np.arange(len(row.at)), row.targets], atol=1e-5)
        np.testing.assert_allclose(row.columns["entropy"], -(np.exp(full) * full).sum(-1), atol=1e-5)
        np.testing.assert_allclose(row.columns["target"], full, atol=1e-5)


def test_nothing_is_scored_that_nobody_asked_for() -> None:
    rows = rows_of(traces())
    for row in rows:
        row.columns.clear()
    learner = build(model())
    learner.score(rows, frozenset())
    assert all(not row.columns for row in rows)
    learner.score(rows, frozenset({"entropy"}))
    assert all(set(row.columns) == {"entropy"} for row in rows)
    with pytest.raises(UserError, match="ref_logprob"):
        learner.score(rows, frozenset({"ref_logprob"}))


def test_the_reference_is_another_network_s_score() -> None:
    rows = rows_of(traces())
    other = model(seed=4)
    build(model(), reference=Network(other)).score(rows, frozenset({"ref_logprob"}))
    found = [row.columns["ref_logprob"] for row in rows]
    build(other).score(rows, frozenset({"old_logprob"}))
    assert all(np.array_equal(a, row.columns["old_logprob"]) for a, row in zip(found, rows, strict=True))


def test_the_same_update_has_the_same_bits() -> None:
    found = []
    for _ in range(2):
        learner = build(model())
        for _ in range(3):
            metrics = learner.update([policy(rows_of(traces()))], 0.0)
        found.append((weights(learner), metrics))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    streams = [policy(rows_of(traces())), Stream("value", rows_of(traces()), "value", "token")]
    learner = build(model().to(dtype), value_head=True, warmup_steps=4)
    for _ in range(2):
        learner.update(streams, 0.0)
    state = learner.state_dict()
    save_file(state["tensors"], tmp_path / "state.safetensors")
    learner.update(streams, 0.5)
    fresh = build(model(seed=8).to(dtype), value_head=True, warmup_steps=4)
    fresh.load_state_dict({"tensors": load_file(tmp_path / "state.safetensors"), "json": state["json"]})
    assert fresh.version == 2
    fresh.update(streams, 0.5)
    assert same(weights(learner), weights(fresh)) and fresh.version == 3
    assert same(learner.state_dict()["tensors"], fresh.state_dict()["tensors"])


def test_bf16_weights_take_steps_too_small_for_bf16() -> None:
    learner = TorchLearner(Network(model().to(torch.bfloat16)), learning_rate=1e-5)
    for _ in range(3):
        learner.update([policy(rows_of(traces()))], 0.0)
    apart = [float((learner.masters[n] - p.float()).abs().max().detach()) for n, p in learner.parameters.items()]
    assert max(apart) > 0.0 and all(p.dtype == torch.bfloat16 for p in learner.network.model.parameters())


def test_a_checkpoint_of_another_shape_is_refused_by_name() -> None:
    learner = build(model())
    state = learner.state_dict()
    name = next(iter(state["tensors"]))
    state["tensors"][name] = torch.zeros(3)
    with pytest.raises(UserError, match=name):
        build(model()).load_state_dict(state)
    del state["tensors"][name]
    with pytest.raises(UserError, match=name):
        build(model()).load_state_dict(state)


@pytest.mark.parametrize("column", ["advantage", "ref_logprob"])
def test_a_row_that_is_not_finite_is_named_saved_and_not_learnt_from(tmp_path: Path, column: str) -> None:
    learner = build(model(), failure_folder=tmp_path / "failures")
    rows = rows_of(traces())
    before = learner.state_dict()
    rows[3].columns[column][0] = np.nan
    metrics = learner.update([policy(rows, kl=0.1)], 0.0)
    assert (metrics["updates_skipped"], metrics["rows_nonfinite"], learner.version) == (1.0, 1.0, 0)
    assert same(weights(learner), {n: before["tensors"][n] for n in weights(learner)})
    with np.load(tmp_path / "failures" / "nonfinite-000000.npz", allow_pickle=False) as saved:
        assert saved["keys"].tolist() == ["/".join(map(str, rows[3].key))]
        assert np.array_equal(saved["0.ids"], rows[3].ids) and np.isnan(saved[f"0.{column}"][0])
    stopping = build(model(), on_nonfinite="stop")
    with pytest.raises(UserError, match=rows[3].trace.key.replace(".", r"\.")):
        stopping.update([policy(rows, kl=0.1)], 0.0)
    rows[3].columns[column][0] = 0.0
    assert learner.update([policy(rows, kl=0.1)], 0.0)["updates_skipped"] == 0.0 and learner.version == 1


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is() -> None:
    built = model()
    rows = rows_of(traces(groups=1, size=1))
    learner = build(built)
    built.model.layers[0].mlp.down_proj.weight.register_hook(lambda g: g * float("inf"))
    before = weights(learner)
    assert learner.update([policy(rows)], 0.0)["updates_skipped"] == 1.0
    assert same(before, weights(learner))


def test_learning_rate_rises_then_follows_the_schedule_and_the_gradient_is_clipped() -> None:
    rows = rows_of(traces())
    learner = build(model(), warmup_steps=2, schedule="linear", grad_clip=1e-9)
    seen = [learner.update([policy(rows)], p)["learning_rate"] for p in (0.0, 0.0, 0.5)]
    assert seen == pytest.approx([5e-3, 1e-2, 1e-2 * linear(0.5)])
    first = max(float(m["exp_avg"].abs().max()) for m in learner.optimizer.state.values())
    assert 0.0 < first < 1e-9


def test_mistakes_are_named_in_one_sentence() -> None:
    learner = build(model())
    rows = rows_of(traces())
    wrong = [
        (Stream("a", rows, "polcy", "token"), "polcy"),
        (Stream("a", rows, "policy:pp", "token"), "policy:pp"),
        (Stream("a", rows, "kl", "token"), "'target'"),
        (Stream("a", rows, "nll", "tokens"), "tokens"),
        (Stream("a", rows, "value", "token"), "value_head"),
        (policy(rows, lowest=0.1), "lowest"),
        (policy(rows, low=np.zeros(2, np.float32)), "'low'"),
        (policy([*rows, rows[0]]), "twice"),
        (Stream("a", rows, "nll", "token", token_weight="w"), "'w'"),
    ]
    for stream, text in wrong:
        with pytest.raises(UserError, match=text):
            learner.update([stream], 0.0)
    with pytest.raises(UserError, match="cosin"):
        build(model(), schedule="cosin")
    del rows[0].columns["old_logprob"]
    with pytest.raises(UserError, match="score all or none"):
        learner.update([policy(rows)], 0.0)


def test_without_rows_there_is_no_step() -> None:
    learner = build(model())
    assert learner.update([], 0.0)["tokens_trained"] == 0.0
    assert learner.update([policy([])], 0.0)["grad_norm"] == 0.0 and learner.version == 0


def test_saving_reads_back_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build(model())
    learner.update([policy(rows_of(traces()))], 0.0)
    learner.save_pretrained(tmp_path / "good")
    stale = model()
    kept = type(stale).save_pretrained
    monkeypatch.setattr(learner.network.model, "save_pretrained", lambda folder: kept(stale, folder))
    with pytest.raises(UserError, match="do not use it"):
        learner.save_pretrained(tmp_path / "bad")


def test_an_adapter_alone_is_trained_and_its_reference_is_the_model_without_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = model()
    plain = rows_of(traces())
    build(base).score(plain, frozenset({"old_logprob"}))
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, settings).eval()
    learner = build(adapted)
    assert all("lora_" in name for name in learner.parameters)
    frozen = {n: p.clone() for n, p in adapted.named_parameters() if "lora_" not in n}
    rows = rows_of(traces())
    for row in rows:
        del row.columns["old_logprob"]
    for _ in range(3):
        learner.update([policy(rows)], 0.0)
    assert all(torch.equal(frozen[n], p) for n, p in adapted.named_parameters() if n in frozen)
    learner.score(rows, frozenset({"ref_logprob", "old_logprob"}))
    for row, other in zip(rows, plain, strict=True):
        np.testing.assert_allclose(row.columns["ref_logprob"], other.columns["old_logprob"], atol=2e-5)
    moved = np.concatenate([r.columns["old_logprob"] - r.columns["ref_logprob"] for r in rows])
    assert np.abs(moved).max() > 1e-2
    learner.save_pretrained(tmp_path)
    learner.update([policy(rows)], 0.0)  # the adapter is still the trained one
    assert learner.version == 4 and learner.state_dict()["tensors"].keys() >= learner.parameters.keys()
