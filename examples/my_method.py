"""A method of your own: a small price on every turn, so that short successes are worth more.

assay train --env countdown --method grpo,examples.my_method:MyMethod --MyMethod.price 0.02
"""

import assay


class MyMethod(assay.Method):
    """Reward minus `price` for each turn. Success stays what it was: metrics only read the facts.

    price: what one turn costs.
    """

    def __init__(self, price: float = 0.01) -> None:
        self.price = price

    def reward(self, batch, rows):
        costs = {trace.key: self.price * len(trace.turns) for trace in batch.traces}
        for key, cost in costs.items():
            batch.scores[key] -= cost
        return {"turn_price": sum(costs.values()) / max(len(costs), 1)}
