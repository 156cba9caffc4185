"""What a newcomer meets first: the overview, quick help, and one sentence for every mistake."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from small_run import only_json

from assay.cli.main import COMMANDS, main, overview

HEAVY = ("torch", "transformers", "minigrid", "pyarrow", "scipy", "matplotlib")


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more}
    return subprocess.run([sys.executable, "-m", "assay", *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["envs"], ["methods"], ["models"], ["train", "--help"], ["eval", "-h"]]
)
def test_help_and_lists_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom assay.cli.main import main\n"
        f"code = main({arguments})\n"
        f"print('loaded', [m for m in {HEAVY} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded [] 0", done.stdout + done.stderr


def test_import_assay_costs_nothing() -> None:
    code = "import sys, assay; print([m for m in ('numpy', 'torch', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_assay_alone_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown == overview()
    assert all(f"assay {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help_page_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"  assay {name}" in page and page.index(f"  assay {name}") < page.index("options")


def test_as_a_module_with_version_and_json() -> None:
    assert run("--version").stdout == f"assay {version('assay')}\n"
    names = [record["name"] for record in json.loads(run("envs", "--json").stdout)]
    assert "countdown" in names and "babyai/GoToLocal" in names


def test_methods_name_paper_and_fidelity(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    records = {record["name"]: record for record in only_json(capsys.readouterr().out)}
    assert records["dapo"]["fidelity"] == "reconstruction" and "2503.14476" in records["dapo"]["paper"]


MISTAKES = {
    "command": ("trian", "unknown command 'trian': did you mean 'train'?"),
    "flag": ("train --stepz 3", "unknown option --stepz: did you mean --steps?"),
    "type": ("train --steps many", "--steps many: input should be a valid integer"),
    "bound": ("train --steps -3", "steps = -3: input should be greater than or equal to 0"),
    "environment": ("train --env countdwn", "environment 'countdwn' does not exist: did you mean 'countdown'?"),
    "setting": ("train --env-args.rooms 9", "unknown option --env-args.rooms: did you mean --env-args.room?"),
    "setting's value": ("train --env-args.room 2 --dry-run", "room 2 of BabyAI"),
    "method": ("train --method grp", "method 'grp' is no preset, and the first one must be: did you mean 'grpo'?"),
    "preset": ("train --preset nothing", "preset 'nothing' does not exist"),
    "file": ("train nowhere.toml", "nowhere.toml does not exist"),
    "run": ("report nowhere", "nowhere is not a run directory"),
    "run to resume": ("resume nowhere", "nowhere is not a run directory"),
    "nothing to evaluate on": ("eval nowhere", "'nowhere' is not a run directory, so it has no environment"),
    "missing argument": ("eval", "POLICY is missing"),
    "split": ("play --split test", "--split test: the splits are train, iid, ood"),
    "kind": ("new thing x", "--kind thing: input should be 'env' or 'method'"),
}


@pytest.mark.parametrize("kind", sorted(MISTAKES))
def test_a_mistake_is_one_sentence_and_exit_code_2(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = MISTAKES[kind]
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("assay: ") and err.count("\n") == 1
    assert message in err


def test_the_traceback_is_there_when_asked_for() -> None:
    plain, traced = run("envs", "extra"), run("envs", "extra", ASSAY_TRACEBACK="1")
    assert plain.returncode == 2 and "Traceback" not in plain.stderr and plain.stderr.count("\n") == 1
    assert "Traceback" in traced.stderr


def test_a_reader_who_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m assay train --dry-run | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
