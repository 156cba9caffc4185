"""The causal Transformer: it cannot look ahead, kept keys and values change nothing, and it refuses unknown positions."""

import numpy as np
import pytest
import torch

from assay.studies.icl.transformer import CausalTransformer, Shape, episode_tokens, torch_generator

HEADS = (("decision", 2), ("state", 3))


def model(positions: str = "learned", horizon: int = 6, seed: int = 0) -> CausalTransformer:
    shape = Shape(5, horizon, HEADS, width=16, layers=2, heads=2, positions=positions)  # type: ignore[arg-type]
    return CausalTransformer(shape, torch_generator(seed, "test"))


@pytest.mark.parametrize("positions", ["learned", "none", "relative"])
def test_p01_laws_do_not_change_when_later_tokens_do(positions: str) -> None:
    net = model(positions)
    tokens = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(1))
    before = net.log_law(tokens)
    for t in range(6):
        edited = tokens.clone()
        edited[:, t + 1 :] = 9.0
        after = net.log_law(edited)
        assert torch.allclose(after[:, : t + 1], before[:, : t + 1], atol=1e-5)
        assert not torch.allclose(after[:, t + 1], before[:, t + 1], atol=1e-3)


def test_p01_a_prefix_alone_has_the_same_laws() -> None:
    net = model()
    tokens = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(net.log_law(tokens[:, :4]), net.log_law(tokens)[:, :4], atol=1e-5)


def test_an_earlier_token_does_change_a_later_law() -> None:
    net = model()
    tokens = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(2))
    edited = tokens.clone()
    edited[:, 1] += 1.0
    assert (net.log_law(edited)[:, 6] - net.log_law(tokens)[:, 6]).abs().max() > 1e-4


@pytest.mark.parametrize("positions", ["learned", "none", "relative"])
def test_token_by_token_with_kept_keys_gives_what_one_pass_gives(positions: str) -> None:
    net = model(positions)
    tokens = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(3))
    past = None
    for t in range(7):
        hidden, past = net.step(tokens[:, t : t + 1], past)
        assert torch.allclose(hidden[:, 0], net(tokens)[:, t], atol=1e-5)


def test_learned_positions_beyond_the_horizon_are_refused_and_others_go_on() -> None:
    tokens = torch.zeros(1, 8, 5)
    with pytest.raises(ValueError, match="positions were learned for 6"):
        model()(tokens)
    with pytest.raises(ValueError, match="7 interactions"):
        net = model()
        net.step(tokens[:, :1], net.step(tokens[:, :7], None)[1])
    for positions in ("none", "relative"):
        assert model(positions)(tokens).shape == (1, 8, 16)


def test_without_positions_only_the_set_of_earlier_interactions_counts_and_with_a_distance_their_order_too() -> None:
    tokens = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(4))
    turned = tokens[:, [0, 2, 1, 3, 4]]
    shape = Shape(5, 6, HEADS, width=16, layers=1, heads=2, positions="none")
    alone = CausalTransformer(shape, torch_generator(0, "test"))
    assert torch.allclose(alone(tokens)[:, 4], alone(turned)[:, 4], atol=1e-5)
    assert not torch.allclose(model("relative")(tokens)[:, 4], model("relative")(turned)[:, 4], atol=1e-4)


def test_the_relative_penalty_is_a_slope_times_the_distance() -> None:
    bias = model("relative")._bias(1, 3)  # 2 heads: slopes 2^-4 and 2^-8
    inf = float("inf")
    assert bias[0].tolist() == [[-1 / 16, 0.0, -inf], [-2 / 16, -1 / 16, 0.0]]
    assert bias[1].tolist() == [[-1 / 256, 0.0, -inf], [-2 / 256, -1 / 256, 0.0]]


def test_the_same_seed_gives_the_same_weights_and_global_draws_do_not_matter() -> None:
    first = [w.detach().clone() for w in model(seed=5).parameters()]
    state = torch.get_rng_state()
    torch.rand(3)
    second, third = list(model(seed=5).parameters()), list(model(seed=6).parameters())
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_the_start_token_carries_the_flag_and_interactions_do_not() -> None:
    tokens = episode_tokens(np.array([[[1.0, 0.0], [0.0, 1.0]]]))
    assert tokens.tolist() == [[[0, 0, 1], [1, 0, 0], [0, 1, 0]]]
