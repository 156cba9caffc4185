import subprocess
import sys

import gymnasium
import pytest

from assay.envs.registry import ENVIRONMENTS, environments, make
from assay.protocols import Env, UserError

OWN = """
import gymnasium

class Mine(gymnasium.Env):
    def __init__(self, length: int, colour="red"):
        self.length, self.colour = length, colour

class Open(gymnasium.Env):
    def __init__(self, **settings):
        self.settings = settings

class Plain:
    pass

def function():
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module, importable as own_env."""
    (tmp_path / "own_env.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_env", None)


def complaint(name, **settings):
    with pytest.raises(UserError) as caught:
        make(name, **settings)
    return str(caught.value)


def test_every_babyai_name_makes_its_level():
    names = [name for name in ENVIRONMENTS if name.startswith("babyai/")]
    assert len(names) == 6
    for name in names:
        env = make(name, room=7)
        assert isinstance(env, Env) and isinstance(env, gymnasium.Env)
        assert name == f"babyai/{env.level}" and env.rooms["train"] == 7


def test_the_list_has_a_line_for_each_name():
    assert [name for name, _ in environments()] == list(ENVIRONMENTS)
    assert all(line and "\n" not in line for _, line in environments())


def test_listing_environments_imports_none_of_their_libraries():
    code = (
        "import sys; from assay.envs.registry import environments; environments();"
        "print([m for m in ('torch', 'minigrid', 'textworld', 'transformers', 'pygame') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_answered_with_the_nearest():
    assert "did you mean 'babyai/GoToLocal'" in complaint("babyai/GotoLocal")
    assert "did you mean 'countdown'" in complaint("countdwn")


def test_an_unknown_setting_is_answered_with_the_nearest_and_all_accepted():
    said = complaint("babyai/GoToLocal", rooms=7)
    assert "no setting 'rooms'" in said and "did you mean 'room'" in said
    assert "room, ood_room, objects, horizon" in said and "level" not in said


def test_a_name_keeps_its_meaning():
    assert "fixes 'level'" in complaint("babyai/GoToLocal", level="GoToObj")


def test_an_environment_refuses_bad_values_itself():
    assert "room 3" in complaint("babyai/GoToLocal", room=3)


def test_a_missing_extra_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "textworld"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textworld", None)  # what `import textworld` meets when it is not installed
    monkeypatch.delitem(sys.modules, "assay.envs.textworld", raising=False)
    said = complaint("textworld-cooking")
    assert "textworld-cooking" in said and "pip install assay[textworld]" in said


def test_a_users_own_class_is_made_with_its_settings(own):
    env = make("own_env:Mine", length=3, colour="blue")
    assert (env.length, env.colour) == (3, "blue")
    assert make("own_env:Open", anything=1).settings == {"anything": 1}


def test_mistakes_in_a_users_own_path_are_told_apart(own):
    assert "'no_such_module' could not be imported" in complaint("no_such_module:Mine")
    assert "no_such_dependency" in complaint("own_broken:Mine")
    assert "has no 'Mime': did you mean 'Mine'" in complaint("own_env:Mime")
    assert "'Plain' is not a gymnasium.Env" in complaint("own_env:Plain")
    assert "'function' is not a gymnasium.Env" in complaint("own_env:function")
    assert "names no module" in complaint(":Mine")
    assert "has no ''" in complaint("own_env:")


def test_mistakes_in_a_users_own_settings_are_told_apart(own):
    assert "needs the setting length" in complaint("own_env:Mine")
    assert "did you mean 'colour'? It takes length, colour" in complaint("own_env:Mine", length=1, color="red")
