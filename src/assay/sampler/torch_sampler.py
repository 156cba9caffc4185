"""The in-process sampler: continuous batching over episodes that stand at different turns.

A context keeps its keys and values in a slot across turns, so a turn forwards only what is new: the last sampled token of
the answer before and the ids that the environment appended. One `tick` forwards every pending token of every submitted
request, prompts and single tokens together, and samples one token for each. What a tick computes, and in which order,
depends on the calls alone: contexts in the order of their handles, the lowest free handle given first, clocks nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.model import Network
from assay.protocols import Completion, Draw, Learner, Sampling, UserError
from assay.sampler.cache import Ints, SlotAttention, SlotCache, pieces
from assay.trace import Ids

FORWARD_TOKENS = {"cpu": 1024, "cuda": 16384}  # flat tokens of one forward, about; on a CPU what its L2 cache holds
TURN_TOKENS = 32  # appended by a turn, at most; more pending tokens are a prompt (decides only what attends together)
SAMPLE_ENTRIES = 1 << 22  # logits that are in memory as probabilities at one time
OPEN, BUSY = 1, 2  # states of a slot; 0 is free


class Copies(NamedTuple):
    """C cache entries that are computed in another slot: `position` of `slot` is that of `owner`."""

    owner: Ints  # [C]
    slot: Ints  # [C]
    position: Ints  # [C]


class TorchSampler:
    """`Sampler` over a `Network`, for at most `capacity` open contexts of at most `max_length` tokens.

    `decode` turns ids into exact text and is needed for stop strings only. `forwarded`, `shared` and `sampled` count
    tokens: computed by a forward, copied from a context with the same beginning, drawn.
    """

    def __init__(
        self,
        network: Network,
        capacity: int,
        max_length: int,
        decode: Callable[[Ids], str] | None = None,
        share_prompts: bool = True,
    ) -> None:
        if max_length > network.max_length:
            raise UserError(
                f"max_length is {max_length}, but {type(network.model).__name__} has {network.max_length} positions: "
                f"lower max_length"
            )
        self.network, self.capacity, self.max_length = network, capacity, max_length
        self.decode, self.share_prompts = decode, share_prompts
        self.version = 0
        self.forwarded = self.shared = self.sampled = 0
        self.cache = SlotCache(network.layers, network.key_heads, network.head_size, network.dtype, network.device)
        self.state = np.zeros(capacity, np.int8)
        self.lengths = np.zeros(capacity, np.int64)  # tokens of the context
        self.cached = np.zeros(capacity, np.int64)  # of them in the cache, from the start
        self.ids = np.zeros((capacity, 0), np.int32)  # [capacity, room], filled up to `lengths`
        self.begin = np.zeros(capacity, np.int64)  # where the answer begins
        self.limit = np.zeros(capacity, np.int64)  # length at which the answer ends
        self.cut_short = np.zeros(capacity, bool)  # `limit` is the context's room, not the request's
        self.temperature = np.zeros(capacity)
        self.stop_row = np.zeros(capacity, np.int64)  # row of `stop_table`
        self.stop_rows: dict[tuple[int, ...], int] = {(): 0}
        self.stop_table = np.zeros((1, network.vocabulary), bool)
        self.uniforms = np.zeros((capacity, 0))  # [capacity, answer]: float64 draws, then log-probs and entropies
        self.logprobs = np.zeros((capacity, 0), np.float32)
        self.entropies = np.zeros((capacity, 0), np.float32)
        self.stop_strings: dict[int, tuple[str, ...]] = {}  # of the busy slots that have any
        self.full: list[int] = []  # submitted without room for a single token
        self._take_weights()

    def _take_weights(self) -> None:
        with torch.no_grad():
            self.weights = self.network.weights()
        self.parameters = list(
            self.network.model.parameters()
        )  # walking the modules every tick costs 6 % of a small one
        self.parameter_versions = self._parameter_versions()

    def _parameter_versions(self) -> int:
        return sum(p._version for p in self.parameters)

    def memory_bytes(self) -> int:
        """Bytes of the cache as it has grown so far."""
        return self.cache.memory_bytes()

    def load(self, learner: Learner) -> None:
        """Takes `learner.network` and its version. Keys and values of other weights are worthless: none may be open."""
        if self.state.any():
            raise ValueError(f"load while {np.count_nonzero(self.state)} contexts are open: close them first")
        network: Network = learner.network  # type: ignore[attr-defined]
        self.network, self.version = network, learner.version
        self._take_weights()

    def open(self) -> int:
        free = np.flatnonzero(self.state == 0)
        if not len(free):
            raise UserError(f"all {self.capacity} contexts of the sampler are open: raise its capacity, or close some")
        context = int(free[0])
        self.state[context] = OPEN
        self.lengths[context] = self.cached[context] = 0
        return context

    def fork(self, context: int) -> int:
        self._check_idle(context, "fork")
        copy = self.open()
        length, cached = int(self.lengths[context]), int(self.cached[context])
        self._reserve(copy + 1, length)
        with torch.inference_mode():
            self.cache.copy(context, copy, cached)
        self.ids[copy, :length] = self.ids[context, :length]
        self.lengths[copy], self.cached[copy] = length, cached
        return copy

    def truncate(self, context: int, length: int) -> None:
        self._check_idle(context, "truncate")
        if not 0 <= length <= self.lengths[context]:
            raise ValueError(f"context {context} has {self.lengths[context]} tokens: cannot truncate it to {length}")
        self.lengths[context] = length
        self.cached[context] = min(int(self.cached[context]), length)

    def close(self, context: int) -> None:
        """Frees the context; a request that runs in it is dropped."""
        if self.state[context] == 0:
            raise ValueError(f"close: context {context} is not open")
        self.state[context] = 0
        self.stop_strings.pop(context, None)
        self.full = [c for c in self.full if c != context]

    def length(self, context: int) -> int:
        return int(self.lengths[context])

    def submit(self, draw: Draw) -> None:
        """Without room for one token behind `draw.ids` the ids are not appended, and the answer is empty: "context"."""
        context, sampling, new = draw.context, draw.sampling, len(draw.ids)
        self._check_idle(context, "submit")
        most = sampling.max_new_tokens
        if most < 1 or sampling.temperature < 0:
            raise UserError(f"{sampling} cannot be sampled: max_new_tokens is at least 1, temperature at least 0")
        if sampling.temperature > 0 and len(draw.uniforms) < most:
            raise ValueError(f"{len(draw.uniforms)} uniforms for {most} tokens: a draw needs one per token")
        if sampling.stop_strings and self.decode is None:
            raise UserError("stop strings need the sampler's `decode`: pass it, or use stop ids")
        if new and not 0 <= draw.ids.min() <= draw.ids.max() < self.network.vocabulary:
            raise UserError(f"a draw appends ids outside the model's vocabulary of {self.network.vocabulary}")
        length = int(self.lengths[context]) + new
        if length == 0:
            raise ValueError(
                f"context {context} is empty and the draw appends nothing: there is nothing to predict from"
            )
        self.state[context] = BUSY
        if length >= self.max_length:
            self.full.append(context)
            return
        self._reserve(context + 1, min(length + most, self.max_length))
        self.ids[context, length - new : length] = draw.ids
        self.lengths[context] = self.begin[context] = length
        self.cached[context] = min(int(self.cached[context]), length - 1)  # the last token is needed for its logits
        self.limit[context] = min(length + most, self.max_length)
        self.cut_short[context] = length + most > self.max_length
        self.temperature[context] = sampling.temperature
        self.stop_row[context] = self._stop_row(sampling)
        if sampling.stop_strings:
            self.stop_strings[context] = sampling.stop_strings
        if most > self.uniforms.shape[1]:
            wider = [(0, 0), (0, most - self.uniforms.shape[1])]
            self.uniforms, self.logprobs = np.pad(self.uniforms, wider), np.pad(self.logprobs, wider)
            self.entropies = np.pad(self.entropies, wider)
        if sampling.temperature > 0:
            self.uniforms[context, :most] = draw.uniforms[:most]

    def tick(self) -> list[tuple[int, Completion]]:
        """One token for every submitted request. An answer's last token is not in the cache yet: it is forwarded with
        what comes next. UserError where the model's logits are not finite."""
        ended = [(context, self._complete(context, 0, "context")) for context in self.full]
        self.full = []
        slot = np.flatnonzero(self.state == BUSY)
        if len(slot):
            if self._parameter_versions() != self.parameter_versions:
                raise ValueError("the model's weights have changed under the sampler: call load() after an update")
            with torch.inference_mode():
                ended += self._sample(slot, self._forward(slot))
        return sorted(ended, key=lambda pair: pair[0])

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def _check_idle(self, context: int, what: str) -> None:
        if not 0 <= context < self.capacity or self.state[context] != OPEN:
            busy = 0 <= context < self.capacity and self.state[context] == BUSY
            raise ValueError(f"{what}: context {context} {'has a request running' if busy else 'is not open'}")

    def _reserve(self, slots: int, length: int) -> None:
        with torch.inference_mode():
            self.cache.reserve(slots, length)
        room = self.cache.length - self.ids.shape[1]
        if room > 0:
            self.ids = np.pad(self.ids, [(0, 0), (0, room)])

    def _stop_row(self, sampling: Sampling) -> int:
        row = self.stop_rows.setdefault(sampling.stop_ids, len(self.stop_rows))
        if row == len(self.stop_table):
            new = np.zeros((1, self.network.vocabulary), bool)
            new[0, list(sampling.stop_ids)] = True
            self.stop_table = np.concatenate([self.stop_table, new])
        return row

    def _complete(self, context: int, number: int, stop: str) -> Completion:
        self.state[context] = OPEN
        self.stop_strings.pop(context, None)
        begin = int(self.begin[context])
        return Completion(
            self.ids[context, begin : begin + number].copy(),
            self.logprobs[context, :number].copy(),
            self.entropies[context, :number].copy(),
            stop,
        )

    # ---------------------------------------------------------------------------------------------------- forward

    def _forward(self, slot: Ints) -> Tensor:
        """Final hidden state [B, D] at the last token of each busy slot; every pending token is in the cache after."""
        start = self.cached[slot]
        order, copies = np.arange(len(slot)), None
        if self.share_prompts and np.count_nonzero(start == 0) > 1:
            order, start, copies = self._share(slot, start)
        count = self.lengths[slot] - start
        self.forwarded += int(count.sum())
        bins = [order]
        most = FORWARD_TOKENS[self.network.device.type]
        if count.sum() > most:
            number = (np.cumsum(count[order]) - 1) // most
            bins = np.split(order, np.flatnonzero(np.diff(number)) + 1)
        bins = [np.sort(chosen) for chosen in bins]
        parts = [self._run(slot[chosen], start[chosen], count[chosen], copies) for chosen in bins]
        self.cached[slot] = self.lengths[slot]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts).index_select(0, self._tensor(np.argsort(np.concatenate(bins))))

    def _share(self, slot: Ints, start: Ints) -> tuple[Ints, Ints, Copies]:
        """Contexts that start from empty share what they begin with: (order, start, copies).

        In lexicographic order a context has most in common with the one before it, so the shared beginnings form a
        tree: each token is computed once, in the slot of the first context that has it, and copied into the others.
        `order` puts a slot behind those it copies from. A context computes at least its last token.
        """
        fresh = np.flatnonzero(start == 0)
        ids = {i: self.ids[slot[i], : self.lengths[slot[i]]] for i in fresh.tolist()}
        ordered = sorted(ids, key=lambda i: (ids[i].tobytes(), i))
        start = start.copy()
        owner = {ordered[0]: np.full(len(ids[ordered[0]]), slot[ordered[0]])}
        for before, i in pairwise(ordered):
            most = min(len(ids[before]), len(ids[i]) - 1)
            differ = np.flatnonzero(ids[before][:most] != ids[i][:most])
            start[i] = differ[0] if len(differ) else most
            own = np.full(len(ids[i]) - start[i], slot[i])
            owner[i] = np.concatenate([owner[before][: start[i]], own])
        self.shared += int(start[fresh].sum())
        copies = Copies(
            np.concatenate([owner[i][: start[i]] for i in ordered]),
            np.repeat(slot[ordered], start[ordered]),
            np.concatenate([np.arange(start[i]) for i in ordered]),
        )
        return np.concatenate([np.flatnonzero(self.cached[slot] > 0), np.array(ordered)]), start, copies

    def _run(self, slot: Ints, start: Ints, count: Ints, copies: Copies | None) -> Tensor:
        """One forward of `count` tokens of each context from `start`: hidden state [M, D] at the last one of each.

        Single tokens, turns and prompts come apart, so that neighbours in an attention call are of one kind.
        """
        order = np.argsort((count > 1) * 1 + (count > TURN_TOKENS), kind="stable")
        slot, start, count = slot[order], start[order], count[order]
        first = np.cumsum(count) - count
        written = None
        if copies is not None:
            offset = np.full(self.capacity, -1)  # of a slot's entry 0 among the flat tokens, made positive by `length`
            offset[slot] = first - start + self.cache.length
            here = offset[copies.owner] >= 0
            source = offset[copies.owner] + copies.position - self.cache.length
            written = source[here], copies.slot[here], copies.position[here]
        group = self.network.heads // self.network.key_heads
        attend = SlotAttention(self.cache, *pieces(slot, start, count), group, written)
        tokens = self.ids[attend.token_slot, attend.token_position].astype(np.int64)
        positions = self._tensor(attend.token_position)
        hidden = self.network.hidden(self._tensor(tokens), positions, attend, self.weights)
        if len(hidden) == len(slot):
            return hidden
        last = np.empty_like(first)
        last[order] = first + count - 1
        return hidden.index_select(0, self._tensor(last))

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.network.device)

    # --------------------------------------------------------------------------------------------------- sampling

    def _sample(self, slot: Ints, hidden: Tensor) -> list[tuple[int, Completion]]:
        number = self.lengths[slot] - self.begin[slot]
        temperature, uniform = self.temperature[slot], self.uniforms[slot, number]
        rows = max(1, SAMPLE_ENTRIES // self.network.vocabulary)
        drawn = [
            draw_tokens(self.network.logits(hidden[i : i + rows]), temperature[i : i + rows], uniform[i : i + rows])
            for i in range(0, len(slot), rows)
        ]
        tokens, logprobs, entropies = (np.concatenate(column) for column in zip(*drawn, strict=True))
        if not np.isfinite(logprobs).all():
            bad = slot[~np.isfinite(logprobs)][0]
            raise UserError(f"the model's logits are not finite (context {bad}): its weights have diverged")
        self.logprobs[slot, number], self.entropies[slot, number] = logprobs, entropies
        self.ids[slot, self.lengths[slot]] = tokens
        self.lengths[slot] += 1
        self.sampled += len(slot)
        stopped = self.stop_table[self.stop_row[slot], tokens]
        for context in self.stop_strings:
            i = int(np.searchsorted(slot, context))
            stopped[i] = stopped[i] or self._at_stop_string(context, int(number[i]) + 1)
        ended = []
        for i in np.flatnonzero(stopped | (self.lengths[slot] == self.limit[slot])).tolist():
            context = int(slot[i])
            stop = "stop" if stopped[i] else "context" if self.cut_short[context] else "length"
            ended.append((context, self._complete(context, int(number[i]) + 1, stop)))
        return ended

    def _at_stop_string(self, context: int, number: int) -> bool:
        """Does a stop string end in the answer's last token? A token has a byte at least, so the tail decides; four
        more tokens, so that a character cut in two or a leading space stripped by `decode` is not part of it."""
        strings = self.stop_strings[context]
        tail = min(number, max(len(s.encode()) for s in strings) + 4)
        end = int(self.lengths[context])
        assert self.decode is not None
        text = self.decode(self.ids[context, end - tail : end])
        return any(s in text for s in strings)


def draw_tokens(logits: Tensor, temperature: NDArray, uniform: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Token, log-prob and full-vocabulary entropy (nats) of each row: int64 [B], float32 [B], float32 [B].

    Args: logits fp32 [B, V]; temperature [B], 0 for greedy, whose numbers are those of temperature 1; uniform float64
    [B] in [0, 1). The token is the first whose cumulative probability exceeds the draw, and where rounding leaves the
    sum below the draw the last one with a probability above zero.
    """
    greedy = temperature == 0
    scale = np.where(greedy, 1.0, temperature)
    if (scale != 1).any():
        logits = logits / torch.from_numpy(scale).to(logits.device, torch.float32)[:, None]
    logp = logits.log_softmax(-1)
    probability = logp.exp()
    entropy = -(probability * logp).nan_to_num_(0.0).sum(-1)  # 0 log 0 is 0
    if greedy.all():
        token = logits.argmax(-1)
    else:
        total = probability.cumsum(-1, dtype=torch.float64)
        target = torch.from_numpy(uniform).to(logits.device)[:, None]
        token = torch.searchsorted(total, target, right=True)[:, 0]
        beyond = token == logits.shape[-1]
        if beyond.any():
            last = logits.shape[-1] - 1 - (probability > 0).flip(-1).int().argmax(-1)
            token = torch.where(beyond, last, token)
        if greedy.any():
            token = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), token)
    logprob = logp.gather(-1, token[:, None])[:, 0]
    return token.cpu().numpy(), logprob.cpu().numpy(), entropy.cpu().numpy()
