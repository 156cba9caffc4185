"""The in-process sampler against transformers and brute force: same tokens, same numbers, whatever shares a forward."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.qwen3 import Qwen3Config

from assay.model import Network
from assay.protocols import Draw, Sampling, UserError
from assay.sampler import cache as cache_module
from assay.sampler import torch_sampler
from assay.sampler.torch_sampler import TorchSampler, draw_tokens

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, intermediate_size=48, num_key_value_heads=1, head_dim=16),
    "gpt2": GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None),
    "neox": GPTNeoXConfig(**SMALL, intermediate_size=48),
}
GREEDY = Sampling(0.0, 5)


def build(name="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name])).eval()


@pytest.fixture(scope="module")
def network():
    return Network(build())


def sampler(network, **settings):
    return TorchSampler(network, **{"capacity": 16, "max_length": 200, **settings})


def tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 97, n).astype(np.int32)


def draw(context, ids, sampling=GREEDY, seed=0):
    return Draw(context, ids, sampling, np.random.default_rng(seed).random(sampling.max_new_tokens))


def finish(sampler, *draws):
    """Submits all, ticks until all have ended; the completions in the order of the draws."""
    for d in draws:
        sampler.submit(d)
    done = {}
    while len(done) < len(draws):
        done.update(sampler.tick())
    return [done[d.context] for d in draws]


def brute_force(model, context, answer, temperature=1.0):
    """Log-probs and entropies of `answer` behind `context` by one plain forward."""
    ids = torch.tensor(np.concatenate([context, answer]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].double() / temperature
    p = torch.softmax(logits, -1)
    return p.log()[range(len(answer)), ids[0, len(context) :]].numpy(), -(p * p.log()).sum(-1).numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers_over_turns_of_mixed_lengths(name):
    plain, s = build(name), sampler(Network(build(name)))
    history = {s.open(): np.zeros(0, np.int32) for _ in range(5)}
    for turn in range(4):
        new = {c: tokens(10 * turn + c, [23, 1, 9, 40, 3][c] if turn == 0 else 1 + (c + turn) % 4) for c in history}
        answers = finish(s, *(draw(c, new[c], Sampling(0.0, 2 + c)) for c in history))
        for c, answer in zip(history, answers, strict=True):
            context = np.concatenate([history[c], new[c]])
            ids = torch.tensor(context.astype(np.int64))[None]
            own = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2 + c)
            assert answer.ids.tolist() == own[0, len(context) :].tolist() and answer.stop == "length"
            logprobs, entropies = brute_force(plain, context, answer.ids)
            assert np.abs(answer.logprobs - logprobs).max() < 1e-5
            assert np.abs(answer.entropies - entropies).max() < 1e-5
            history[c] = np.concatenate([context, answer.ids])
            assert s.length(c) == len(history[c])


def test_logprobs_and_entropies_are_those_of_the_sampling_temperature(network):
    s = sampler(network)
    a, b = s.open(), s.open()
    hot, cold = finish(s, draw(a, tokens(1, 6), Sampling(1.7, 8)), draw(b, tokens(1, 6), Sampling(0.6, 8)))
    for answer, temperature in ((hot, 1.7), (cold, 0.6)):
        logprobs, entropies = brute_force(build(), tokens(1, 6), answer.ids, temperature)
        assert np.abs(answer.logprobs - logprobs).max() < 1e-5 and np.abs(answer.entropies - entropies).max() < 1e-5
        assert answer.logprobs.dtype == answer.entropies.dtype == np.float32 and answer.ids.dtype == np.int32


def test_a_fork_has_the_same_future_and_is_independent(network):
    s = sampler(network)
    a = s.open()
    finish(s, draw(a, tokens(0, 12)))
    b, c = s.fork(a), s.fork(a)
    one, two, _ = finish(s, draw(a, tokens(1, 3)), draw(b, tokens(1, 3)), draw(c, tokens(2, 7)))
    assert one.ids.tolist() == two.ids.tolist() and np.abs(one.logprobs - two.logprobs).max() < 1e-6
    s.close(b)
    context = np.concatenate([s.ids[a, : s.length(a)], tokens(3, 2)])
    (after,) = finish(s, draw(a, tokens(3, 2)))
    assert np.abs(after.logprobs - brute_force(build(), context, after.ids)[0]).max() < 1e-5


@pytest.mark.parametrize("length", [1, 9, 12, 15, 17])  # inside the prompt, its end, inside the answer, its last token
def test_truncate_then_append_equals_a_fresh_context(network, length):
    s = sampler(network)
    a, b = s.open(), s.open()
    finish(s, draw(a, tokens(0, 12)))
    s.truncate(a, length)
    context = np.concatenate([s.ids[a, :length], tokens(4, 5)])
    again, fresh = finish(s, draw(a, tokens(4, 5)), draw(b, context))
    assert again.ids.tolist() == fresh.ids.tolist() and np.abs(again.logprobs - fresh.logprobs).max() < 1e-5


def test_a_request_without_new_ids_predicts_from_where_the_context_stands(network):
    s = sampler(network)
    a = s.open()
    first, second = finish(s, draw(a, tokens(0, 12)))[0], finish(s, draw(a, tokens(0, 0)))[0]
    s.truncate(a, 14)  # two tokens of the answer, both in the cache: the last one is forwarded again
    (again,) = finish(s, draw(a, tokens(0, 0), Sampling(0.0, 8)))
    assert again.ids.tolist() == [*first.ids[2:], *second.ids]


def test_a_common_beginning_is_forwarded_once_and_changes_no_number(network):
    prompts = [
        tokens(0, 30),
        tokens(0, 30),
        np.concatenate([tokens(0, 20), tokens(1, 8)]),
        tokens(0, 25),
        tokens(2, 30),
    ]
    answers = {}
    for share in (True, False):
        s = sampler(network, share_prompts=share)
        old = s.open()  # a context that has begun already shares nothing
        finish(s, draw(old, tokens(0, 30), Sampling(0.0, 1)))
        before = s.forwarded
        contexts = [s.open() for _ in prompts]
        for d in [draw(old, tokens(5, 4)), *(draw(c, p) for c, p in zip(contexts, prompts, strict=True))]:
            s.submit(d)
        done = dict(s.tick())
        # sorted, each shares with the one before: 25 alone, 5 behind them, of their double the last token, 8 of those
        # that part at 20, 30 that share nothing; the old context's 4 and its last sampled token
        assert s.forwarded - before == (25 + 5 + 1 + 8 + 30 + 5 if share else 30 + 30 + 28 + 25 + 30 + 5)
        assert s.shared == (25 + 29 + 20 if share else 0)
        while len(done) < 6:
            done.update(s.tick())
        answers[share] = [done[c] for c in [old, *contexts]]
    for with_, without in zip(answers[True], answers[False], strict=True):
        assert with_.ids.tolist() == without.ids.tolist()
        assert np.abs(with_.logprobs - without.logprobs).max() < 1e-5


def test_cutting_into_forwards_and_attention_calls_changes_no_number(network, monkeypatch):
    prompts = [tokens(0, 40 + 3 * i) if i % 3 else tokens(i, 90) for i in range(9)]

    def run():
        s = sampler(network)
        return finish(s, *(draw(s.open(), p) for p in prompts))

    whole = run()
    monkeypatch.setattr(torch_sampler, "FORWARD_TOKENS", {"cpu": 50})
    monkeypatch.setattr(cache_module, "QUERIES", 7)
    monkeypatch.setattr(cache_module, "CALL_BYTES", 2000)
    for a, b in zip(whole, run(), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5


def test_sampled_frequencies_are_the_probabilities(network):
    n = 4000
    p = np.exp([brute_force(build(), tokens(0, 5), np.array([t]), 0.5)[0][0] for t in range(97)])
    s = sampler(network, capacity=n)
    uniforms = np.random.default_rng(7).random((n, 1))
    for row in uniforms:
        s.submit(Draw(s.open(), tokens(0, 5), Sampling(0.5, 1), row))
    counts = np.bincount([c.ids[0] for _, c in s.tick()], minlength=97)
    rare = p * n < 5
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(p[~rare], p[rare].sum()) * n
    assert stats.chisquare(observed, expected * n / expected.sum()).pvalue > 0.01


def test_each_token_has_its_own_uniform(network):
    s = sampler(network)
    a, b = s.open(), s.open()
    uniforms = np.array([0.3, 0.9, 0.1, 0.5])
    for c in (a, b):
        s.submit(Draw(c, tokens(0, 5), Sampling(1.0, 4), uniforms if c == a else uniforms[[0, 1, 3, 2]]))
    done = {}
    while len(done) < 2:
        done.update(s.tick())
    assert done[a].ids[:2].tolist() == done[b].ids[:2].tolist() and done[a].ids[2] != done[b].ids[2]
    context = tokens(0, 5)
    for token, u in zip(done[a].ids, uniforms, strict=True):
        with torch.no_grad():
            p = build()(input_ids=torch.tensor(context.astype(np.int64))[None]).logits[0, -1].double().softmax(-1)
        assert token == np.searchsorted(np.cumsum(p.numpy()), u, side="right")
        context = np.append(context, token)


def test_draws_at_the_edges_never_give_a_token_of_probability_zero():
    impossible = -float("inf")
    logits = torch.tensor([[impossible, 0.1, 0.7, 0.3, impossible]]).repeat(2, 1)
    token, logprob, entropy = draw_tokens(logits, np.ones(2), np.array([0.0, 1 - 2**-53]))
    assert token.tolist() == [1, 3]
    p = np.exp([0.1, 0.7, 0.3]) / np.exp([0.1, 0.7, 0.3]).sum()
    assert np.allclose(logprob, np.log(p[[0, 2]]), atol=1e-6) and np.allclose(
        entropy, -(p * np.log(p)).sum(), atol=1e-6
    )


def test_a_sum_below_the_draw_gives_the_last_possible_token():
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    while logits.log_softmax(-1).exp().double().sum() >= 1 - 2**-53:  # rounding of the parts leaves the sum below 1
        logits = logits * 1.01
    logits = torch.cat([logits, torch.full((1, 5), -1e30)], -1)
    assert draw_tokens(logits, np.ones(1), np.array([1 - 2**-53]))[0].tolist() == [2999]


def test_greedy_and_sampled_rows_share_a_forward():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(3, 1)
    token, logprob, _ = draw_tokens(logits, np.array([0.0, 2.0, 1.0]), np.array([0.99, 0.01, 0.99]))
    assert token.tolist() == [1, 0, 2]
    half = np.exp([0, 1.5, 0.5]) / np.exp([0, 1.5, 0.5]).sum()
    one = np.exp([0, 3.0, 1.0]) / np.exp([0, 3.0, 1.0]).sum()
    assert np.allclose(np.exp(logprob), [one[1], half[0], one[2]], atol=1e-6)


def test_a_stop_id_ends_the_answer_and_belongs_to_it(network):
    s = sampler(network)
    a, b = s.open(), s.open()
    (free,) = finish(s, draw(a, tokens(0, 12), Sampling(0.0, 12)))
    stop = int(free.ids[4])
    first = free.ids.tolist().index(stop)
    (answer,) = finish(s, draw(b, tokens(0, 12), Sampling(0.0, 12, stop_ids=(stop, 96))))
    assert answer.ids.tolist() == free.ids[: first + 1].tolist() and answer.stop == "stop"
    assert s.length(b) == 12 + first + 1
    (last,) = finish(s, draw(b, tokens(0, 0), Sampling(0.0, 1, stop_ids=(int(free.ids[first + 1]),))))
    assert last.stop == "stop"  # the stop token at the limit is a stop


def test_a_stop_string_is_found_across_token_borders_and_not_in_the_prompt(network):
    def decode(ids):
        return "".join("ab<>"[i % 4] * (i % 3 + 1) for i in ids)

    s = sampler(network, decode=decode)
    a, b = s.open(), s.open()
    (free,) = finish(s, draw(a, tokens(0, 12), Sampling(0.0, 40)))
    text = decode(free.ids)
    borders = np.cumsum([len(decode([i])) for i in free.ids])
    stop = text[borders[9] - 1 : borders[11] + 1]  # from inside token 9 into token 12
    expected = int(np.searchsorted(borders, text.index(stop) + len(stop)))
    prompt = tokens(0, 12)
    (answer,) = finish(s, draw(b, prompt, Sampling(0.0, 40, stop_strings=("never", stop))))
    assert answer.ids.tolist() == free.ids[: expected + 1].tolist() and answer.stop == "stop"
    c = s.open()
    (other,) = finish(s, draw(c, prompt, Sampling(0.0, 3, stop_strings=(decode(prompt[-2:]) + text[:1],))))
    assert other.ids.tolist() == free.ids[:3].tolist() and other.stop == "length"


def test_an_answer_ends_where_the_context_is_full(network):
    s = sampler(network, max_length=20)
    a = s.open()
    (answer,) = finish(s, draw(a, tokens(0, 16), Sampling(0.0, 9)))
    assert answer.stop == "context" and len(answer.ids) == 4 and s.length(a) == 20
    (empty,) = finish(s, draw(a, tokens(1, 3)))
    assert empty.stop == "context" and len(empty.ids) == 0 and s.length(a) == 20
    s.truncate(a, 12)
    (fits,) = finish(s, draw(a, tokens(1, 3)))
    assert fits.stop == "length" and s.length(a) == 20  # the request's own limit counts first


def test_finished_requests_leave_at_once_and_later_ones_join(network):
    s = sampler(network)
    a, b, c = s.open(), s.open(), s.open()
    s.submit(draw(a, tokens(0, 5), Sampling(0.0, 1)))
    s.submit(draw(b, tokens(1, 5), Sampling(0.0, 3)))
    assert [x for x, _ in s.tick()] == [a]
    s.submit(draw(c, tokens(2, 5), Sampling(0.0, 2)))
    before = s.sampled
    assert s.tick() == [] and s.sampled - before == 2
    done = dict(s.tick())
    assert list(done) == [b, c] and s.tick() == [] and s.sampled - before == 4
    for context, prompt in ((b, tokens(1, 5)), (c, tokens(2, 5))):
        assert np.abs(done[context].logprobs - brute_force(build(), prompt, done[context].ids)[0]).max() < 1e-5


def script(s, contexts):
    """Turns at different times: what a rollout with slow and fast environments does."""
    answers = []
    for i in range(12):
        for j, c in enumerate(contexts):
            if s.state[c] == 1 and (i + j) % 3 == 0:
                s.submit(draw(c, tokens(100 * i + j, 3 + (i + j) % 5), Sampling(1.0, 1 + (i * j) % 4), seed=i * 50 + j))
        answers += [(contexts.index(c), a) for c, a in s.tick()]
    return answers


def bits(answers):
    return [(c, a.ids.tobytes(), a.logprobs.tobytes(), a.entropies.tobytes(), a.stop) for c, a in answers]


def test_the_same_calls_give_the_same_bits_whatever_the_cache_held_before(network):
    a = sampler(network)
    first = bits(script(a, [a.open() for _ in range(7)]))
    b = sampler(network)
    junk = [b.open() for _ in range(5)]
    finish(b, *(draw(c, tokens(c, 20)) for c in junk))
    for c in junk:
        b.close(c)
    assert len(first) > 10 and bits(script(b, [b.open() for _ in range(7)])) == first


def test_numbers_do_not_depend_on_what_shares_the_forward(network):
    s = sampler(network)
    contexts = [s.open() for _ in range(9)]
    for c in contexts[1::2]:
        s.close(c)  # holes between the slots
    history = {j: np.zeros(0, np.int32) for j in range(5)}
    plain = build()
    for i in range(4):
        draws = [draw(contexts[2 * j], tokens(10 * i + j, 1 + 7 * (j == i)), Sampling(1.0, 2), seed=i) for j in history]
        for j, (d, answer) in enumerate(zip(draws, finish(s, *draws), strict=True)):
            context = np.concatenate([history[j], d.ids])
            assert np.abs(answer.logprobs - brute_force(plain, context, answer.ids)[0]).max() < 1e-5
            history[j] = np.concatenate([context, answer.ids])


def test_handles_are_the_lowest_free_and_too_many_is_one_sentence(network):
    s = sampler(network, capacity=3)
    assert [s.open() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="all 3 contexts"):
        s.open()
    with pytest.raises(UserError, match="all 3 contexts"):
        s.fork(1)
    s.close(1)
    assert s.open() == 1


def test_misuse_is_an_error_and_leaves_the_sampler_usable(network):
    s = sampler(network)
    a = s.open()
    with pytest.raises(ValueError, match="nothing to predict from"):
        s.submit(draw(a, tokens(0, 0)))
    with pytest.raises(UserError, match="vocabulary"):
        s.submit(draw(a, np.array([3, 97], np.int32)))
    with pytest.raises(ValueError, match="uniforms"):
        s.submit(Draw(a, tokens(0, 3), Sampling(1.0, 4), np.zeros(3)))
    with pytest.raises(UserError, match="decode"):
        s.submit(draw(a, tokens(0, 3), Sampling(1.0, 4, stop_strings=("x",))))
    with pytest.raises(UserError, match="max_new_tokens"):
        s.submit(draw(a, tokens(0, 3), Sampling(1.0, 0)))
    s.submit(draw(a, tokens(0, 3)))
    for call in (lambda: s.submit(draw(a, tokens(0, 1))), lambda: s.fork(a), lambda: s.truncate(a, 1)):
        with pytest.raises(ValueError, match="has a request running"):
            call()
    with pytest.raises(ValueError, match="not open"):
        s.truncate(a + 1, 0)
    while not s.tick():
        pass
    assert s.length(a) == 8
    with pytest.raises(ValueError, match="cannot truncate"):
        s.truncate(a, 9)
    s.close(a)
    with pytest.raises(ValueError, match="not open"):
        s.close(a)
    with pytest.raises(UserError, match="256 positions"):
        sampler(network, max_length=257)


def test_a_closed_request_is_dropped(network):
    s = sampler(network, max_length=20)
    a, b = s.open(), s.open()
    s.submit(draw(a, tokens(0, 3)))
    s.submit(draw(b, tokens(0, 30)))
    s.close(a)
    s.close(b)
    assert s.tick() == []


class FakeLearner:
    def __init__(self, network, version):
        self.network, self.version = network, version


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_load_takes_the_weights_as_they_are_now(name):
    model, plain = build(name), build(name)
    s = sampler(Network(model))
    a = s.open()
    finish(s, draw(a, tokens(0, 4)))
    with pytest.raises(ValueError, match="1 contexts are open"):
        s.load(FakeLearner(s.network, 1))
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p += 0.05 * torch.arange(p.numel()).reshape(p.shape).cos()
            q.copy_(p)
    s.submit(draw(a, tokens(1, 2)))
    with pytest.raises(ValueError, match="call load"):
        s.tick()
    s.close(a)
    s.load(FakeLearner(s.network, 3))
    assert s.version == 3
    (answer,) = finish(s, draw(s.open(), tokens(0, 4)))
    assert np.abs(answer.logprobs - brute_force(plain, tokens(0, 4), answer.ids)[0]).max() < 1e-5


def test_diverged_weights_are_one_sentence():
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    s = sampler(Network(model))
    s.submit(draw(s.open(), tokens(0, 4)))
    with pytest.raises(UserError, match="not finite"):
        s.tick()


def test_the_cache_grows_with_what_contexts_hold(network):
    s = sampler(network, capacity=1000)
    assert s.memory_bytes() == 0
    finish(s, draw(s.open(), tokens(0, 10)))
    assert s.memory_bytes() == 2 * 2 * 1 * 2 * 64 * 8 * 4  # layers, keys and values, slots, heads, a block, size, bytes
    b = s.open()
    context = tokens(1, 120)
    (answer,) = finish(s, draw(b, context))
    assert s.memory_bytes() == 2 * 2 * 2 * 2 * 128 * 8 * 4
    assert np.abs(answer.logprobs - brute_force(build(), context, answer.ids)[0]).max() < 1e-5
