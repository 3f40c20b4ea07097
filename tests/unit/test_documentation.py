# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine can check of documentation, roles and playbooks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODULES = sorted(path.stem for path in (ROOT / "library").glob("*.py"))
# Pages of actions that run on the controller: as modules they only say so.
PAGES = (
    "sglang_compare",
    "sglang_eta",
    "sglang_launch_spec",
    "sglang_options",
    "sglang_plan",
    "sglang_record",
    "sglang_router_spec",
)
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
SPECIFIED = [role for role in ROLES if (ROOT / "roles" / role / "meta" / "argument_specs.yml").is_file()]
PLAYBOOKS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.yml"), *(ROOT / "playbooks").glob("*.yml")]
    if "hosts:" in path.read_text(encoding="utf-8") or "import_playbook" in path.read_text(encoding="utf-8")
)
YAML_FILES = sorted([*(ROOT / "roles").rglob("*.yml"), *(ROOT / "playbooks").glob("*.yml")])
KEYWORDS = ("when", "until", "changed_when", "failed_when", "that")


def relative(path):
    return str(path.relative_to(ROOT))


def load(name):
    """A file of library/: an action plugin may have its name."""
    spec = importlib.util.spec_from_file_location(f"library.{name}", ROOT / "library" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Specified(Exception):
    """Carries the argument_spec that a module was about to read its arguments with."""


def argument_spec(module, monkeypatch):
    def refuse(self, argument_spec, **more):
        raise Specified(argument_spec, more)

    monkeypatch.setattr(AnsibleModule, "__init__", refuse)
    with pytest.raises(Specified) as caught, patch_module_args({}):
        module.main()
    return caught.value.args


def compare(where, options, spec):
    """Documented options against a spec, sub-options too."""
    assert list(options) == list(spec), where
    for name, documented in options.items():
        here, declared = f"{where}.{name}", spec[name]
        assert documented.get("description"), here
        for key, default in (("type", "str"), ("required", False), ("default", None), ("choices", None), ("elements", None)):
            assert documented.get(key, default) == declared.get(key, default), f"{here}: {key}"
        compare(here, documented.get("suboptions") or {}, declared.get("options") or {})


@pytest.mark.parametrize("name", [name for name in MODULES if name not in PAGES])
def test_a_modules_documentation_says_what_its_argument_spec_does(name, monkeypatch):
    module = load(name)
    documentation = yaml.safe_load(module.DOCUMENTATION)
    assert documentation["module"] == name
    spec, more = argument_spec(module, monkeypatch)
    compare(name, documentation["options"], spec)
    support = documentation["attributes"]["check_mode"]["support"]
    assert more.get("supports_check_mode", False) is (support == "full")
    assert isinstance(yaml.safe_load(module.EXAMPLES), list)
    assert all(entry.get("description") and entry.get("returned") for entry in yaml.safe_load(module.RETURN).values())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_for_an_action_and_says_so_when_it_is_run(name, call):
    assert (ROOT / "action_plugins" / f"{name}.py").is_file()
    answer = call(load(name), {})
    assert answer["failed"] is True
    assert answer["msg"].startswith(f"{name} ran as a module: expected its action plugin")


def test_the_page_of_the_launch_spec_has_what_the_role_gives():
    module = load("sglang_launch_spec")
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    variables = yaml.safe_load((ROOT / "roles/sglang_server/vars/main.yml").read_text(encoding="utf-8"))
    given = variables["__sglang_server_request"]
    assert set(given) <= set(documented)
    assert {name for name, option in documented.items() if option.get("required")} <= set(given)


def test_every_filter_has_its_page():
    registered = set()
    for path in (ROOT / "filter_plugins").glob("*.py"):
        registered |= set(importlib.import_module(path.stem).FilterModule().filters())
    pages = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "filter_plugins").glob("*.yml")}
    assert set(pages) == registered
    for name, page in pages.items():
        assert page["DOCUMENTATION"]["name"] == name
        assert page["DOCUMENTATION"]["options"] and page["EXAMPLES"] and page["RETURN"]


@pytest.mark.parametrize("role", SPECIFIED)
def test_a_roles_defaults_are_its_argument_specs(role):
    folder = ROOT / "roles" / role
    defaults = yaml.safe_load((folder / "defaults" / "main.yml").read_text(encoding="utf-8"))
    specs = yaml.safe_load((folder / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    assert list(specs["main"]["options"]) == list(defaults)
    for name, option in specs["main"]["options"].items():
        assert name.startswith(f"{role}_")
        assert option["description"] and option["type"], name


def test_every_role_has_argument_specs():
    assert SPECIFIED == ROLES


def test_every_playbook_has_good_syntax(tmp_path):
    environ = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_HOME": str(tmp_path), "ANSIBLE_NOCOLOR": "1"}
    assert "deploy.yml" in PLAYBOOKS and "playbooks/deploy.yml" in PLAYBOOKS
    for inventory in ("inventory/four_gpus.yml", "inventory/local.yml"):
        ran = subprocess.run(
            [BIN / "ansible-playbook", "--syntax-check", "-i", inventory, *PLAYBOOKS],
            cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.split() == [word for name in PLAYBOOKS for word in ("playbook:", name)]


def test_a_playbook_of_the_root_imports_its_namesake():
    for path in ROOT.glob("*.yml"):
        if relative(path) in PLAYBOOKS:
            (play,) = yaml.safe_load(path.read_text(encoding="utf-8"))
            assert play["ansible.builtin.import_playbook"] == f"playbooks/{path.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "roles").rglob("*.j2")), ids=relative)
def test_a_template_parses(path):
    names = jinja2.Environment(extensions=["jinja2.ext.do"]).parse(path.read_text(encoding="utf-8"))
    assert names.body


def tasks_of(node):
    """Every mapping in a file: plays, blocks, tasks and what they hold."""
    if isinstance(node, list):
        for entry in node:
            yield from tasks_of(entry)
    elif isinstance(node, dict):
        yield node
        for value in node.values():
            yield from tasks_of(value)


@pytest.mark.parametrize("path", YAML_FILES, ids=relative)
def test_conditions_hold_no_templates_and_commands_say_when_they_change(path):
    text = path.read_text(encoding="utf-8")
    for task in tasks_of(yaml.safe_load(text)):
        for keyword in KEYWORDS:
            conditions = task.get(keyword)
            for condition in conditions if isinstance(conditions, list) else [conditions]:
                assert "{{" not in str(condition) and "{%" not in str(condition), f"{keyword}: {condition}"
        for action in ("command", "shell", "raw", "script"):
            if f"ansible.builtin.{action}" in task:
                assert "changed_when" in task, task["name"]


@pytest.mark.parametrize("path", YAML_FILES, ids=relative)
def test_no_rescue_ends_itself(path):
    """A block's `when` is that of every task of its rescue too: one that changes what it looks at skips those after it."""
    for task in tasks_of(yaml.safe_load(path.read_text(encoding="utf-8"))):
        for rescuing in task.get("rescue", [])[:-1] if "when" in task else []:
            for name in rescuing.get("ansible.builtin.set_fact") or {}:
                assert name not in str(task["when"]), f"{rescuing['name']} sets {name}, and its block goes by it"


def test_nothing_is_said_in_two_ways():
    """Every action of ours is called by the name of a file that is there."""
    ours = {path.stem for folder in ("library", "action_plugins") for path in (ROOT / folder).glob("sglang_*.py")}
    called = set()
    for path in YAML_FILES:
        if "tasks" in path.parts or "playbooks" in path.parts:
            for task in tasks_of(yaml.safe_load(path.read_text(encoding="utf-8"))):
                if "name" in task:
                    called |= {key for key in task if re.fullmatch(r"sglang_[a-z_]+", key)} & (ours | {"sglang_swap"})
    assert "sglang_server" in called
    assert called <= ours
