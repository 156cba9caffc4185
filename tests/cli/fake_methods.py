"""Methods that are no paper's, for tests of names and settings. Parsed by the command line, imported by a plan."""

from typing import ClassVar, Literal

from assay.protocols import Method, UserError


class Sharp(Method):
    """Sharpens the advantage.

    The idea, in a paragraph: nothing is sharper than a test.

    lam: how sharp; 0 switches it off (paper: 1).
    pace: what follows
        the ratio.
    keep_all: nothing is thrown away.
    """

    name = "sharp-er"
    paper = "arXiv 1234.56789, Sharper"
    fidelity = "reconstruction"
    needs: ClassVar = frozenset({"entropy"})

    def __init__(
        self, lam: float = 1.0, pace: Literal["ratio", "tanh"] = "ratio", keep_all: bool = True, most: int | None = None
    ) -> None:
        if not 0 <= lam <= 10:
            raise ValueError(f"lam is {lam:g}, and must lie in [0, 10]")
        self.lam = lam

    def bind(self, setting):
        if any("rest" in world.skills for world in setting.worlds.values()):
            raise UserError("Sharp cannot rest")
        return ["one update per batch: nothing to sharpen"] if setting.updates == 1 else []

    def modulate(self, batch, rows):
        return {}


class Estimator(Method):
    """Sets the advantage."""

    def advantage(self, batch, rows):
        return {}


class Other(Estimator):
    """Sets it too."""


class Needy(Method):
    """Has a setting without default.

    must: it must be given.
    """

    def __init__(self, must: float, lam: float = 1.0) -> None:
        self.must = must


class Reader(Method):
    """Looks at the renderer before the run."""

    def bind(self, setting):
        return [
            f"{name} stops at {len(world.renderer.stop_ids)} ids, knows {world.skills[0]}"
            for name, world in setting.worlds.items()
        ]
