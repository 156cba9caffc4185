"""Keyed randomness: every draw of a run is a pure function of what it is for.

A stream is named by (run seed, purpose, key...): the order in which episodes finish, workers answer or a run is killed
and resumed cannot change any draw. Left out on purpose: global seeds and generators that are passed around and advanced.
"""

import hashlib

import numpy as np

Key = int | str


def digest(*parts: Key) -> bytes:
    """16 bytes that depend on the parts and their boundaries only; the same in every process (unlike `hash`)."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else str(int(part)).encode()
        h.update(b"%c%d:" % (b"s"[0] if isinstance(part, str) else b"i"[0], len(data)))
        h.update(data)
    return h.digest()


def generator(seed: int, purpose: str, *key: Key) -> np.random.Generator:
    """A fresh generator for one purpose, for instance `generator(seed, "task", step, i)`."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest(seed, purpose, *key), "little")))


def uniforms(seed: int, purpose: str, *key: Key, n: int) -> np.ndarray:
    """float64 [n] in [0, 1): the draws of one generation request, one per token."""
    return generator(seed, purpose, *key).random(n)


def stable_hash(text: str | bytes) -> str:
    """Hex, 16 characters: content hashes of tasks, anchors and configurations."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()
