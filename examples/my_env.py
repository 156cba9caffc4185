"""An environment of your own: guess a number by halving.

assay play --env examples.my_env:MyEnv
assay train --env examples.my_env:MyEnv --warm-start.episodes 200 --steps 20
"""

import assay
from assay.rng import generator, stable_hash


class MyEnv(assay.TextEnv):
    """Guess a number between two others; every answer is "higher" or "lower".

    width: how many numbers there are to choose from. horizon: guesses.
    """

    version = "1"
    brief = "guess the number"
    instructions = "Guess the number. Answer with digits only."

    def __init__(self, width: int = 8, horizon: int = 4) -> None:
        super().__init__()
        self.width, self.horizon = width, horizon

    def reset(self, *, seed=None, options=None):
        split, task = self.pick(seed, options)
        draw = generator(0, "my_env", split, task)
        self.low = {"train": 1, "iid": 2, "ood": 61}[split] + 2 * int(draw.integers(25))  # odd, even, large: disjoint
        self.high, self.turn = self.low + self.width - 1, 0
        self.number = int(draw.integers(self.low, self.high + 1))
        content = stable_hash(f"{self.low} {self.high} {self.number}")
        return self.look(), {"hash": content, "goal": "", "horizon": self.horizon, **self.facts(valid=True)}

    def step(self, action):
        valid, self.turn = action.strip().isdecimal(), self.turn + 1
        guess = int(action) if valid else -1
        if valid:
            self.low = max(self.low, guess + 1) if guess < self.number else self.low
            self.high = min(self.high, guess - 1) if guess > self.number else self.high
        success = guess == self.number
        hint = "right" if success else ("higher, " if guess < self.number else "lower, ") + self.look()
        return hint, float(success), success, self.turn >= self.horizon, self.facts(valid, success)

    def look(self):
        return f"{self.low} to {self.high}"

    def facts(self, valid, success=False):
        admissible = [str(number) for number in range(self.low, self.high + 1)]
        seen = stable_hash(f"{self.turn} {self.look()}")
        facts = {"valid": valid, "success": success, "skill": "guess", "noop": not valid}
        return {**facts, "anchor": seen, "admissible": admissible}

    def expert(self):
        return str((self.low + self.high) // 2)
