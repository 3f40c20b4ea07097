# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profile -> flags -> argv: what merges, what is refused and in which words, and what reaches the engine."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys

import pytest
import sglang_profile
from ansible.errors import AnsibleError, AnsibleFilterError, AnsibleTypeError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import lookup_loader
from ansible.template import Templar
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sglang_profile import flag_changes, flags, launch_spec, resolve_profile

PROFILES = {
    "base": {"abstract": True, "args": {"a": 1, "b": 1}, "env": {"E": "base"}, "requires": {"min_release": "0.5.10"}},
    "child": {"extends": "base", "description": "a child", "args": {"b": 2, "c": None}, "hybrid_args": {"h": 1}},
    "grandchild": {"extends": "child", "args": {"c": 3}, "env": {"E": "grand"}, "requires": {"device": "cuda"}},
    "alone": {"args": {"z": True}},
}


def refusal(function, *args, kind=AnsibleError):
    with pytest.raises(kind) as caught:
        function(*args)
    return caught.value.message


# -- profiles ---------------------------------------------------------------------------------------------------------
def test_a_chain_of_extends_merges_nearest_last():
    assert resolve_profile(PROFILES, "grandchild") == {
        "name": "grandchild",
        "description": "",
        "requires": {"min_release": "0.5.10", "device": "cuda"},
        "args": {"a": 1, "b": 2, "c": 3},
        "hybrid_args": {"h": 1},
        "env": {"E": "grand"},
    }
    assert resolve_profile(PROFILES, "child")["args"] == {"a": 1, "b": 2, "c": None}
    assert resolve_profile(PROFILES, "child")["description"] == "a child"


def test_resolving_changes_no_profile():
    before = copy.deepcopy(PROFILES)
    resolve_profile(PROFILES, "grandchild")["args"]["a"] = "changed"
    assert before == PROFILES


def test_a_profile_that_extends_itself_is_refused_with_its_circle():
    profiles = {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "b"}}
    assert refusal(resolve_profile, profiles, "a") == "profile 'a' extends itself: a -> b -> c -> b"


def test_an_unknown_profile_is_refused_with_the_closest_first():
    assert refusal(resolve_profile, PROFILES, "grandchil") == (
        "profile 'grandchil' is not known: did you mean 'grandchild'? known: grandchild, child, alone"
    )
    assert refusal(resolve_profile, PROFILES, "qqqq") == "profile 'qqqq' is not known: known: child, grandchild, alone"
    assert refusal(resolve_profile, {}, "x") == "profile 'x' is not known: known: none"


def test_an_abstract_profile_cannot_be_deployed_and_is_not_offered():
    message = refusal(resolve_profile, PROFILES, "base")
    assert message.startswith("profile 'base' is not known:")
    assert message.endswith("known: child, grandchild, alone")


def test_extends_of_a_missing_profile_names_both():
    profiles = {"mtp": {"extends": "servin"}, "serving": {"abstract": True}}
    assert refusal(resolve_profile, profiles, "mtp") == (
        "profile 'mtp' extends 'servin', which is not there: did you mean 'serving'? known: serving, mtp"
    )


@pytest.mark.parametrize(
    ("profiles", "text"),
    [
        ({"p": {"arg": {}}}, "profile 'p' has an unknown key 'arg': did you mean 'args'? known: args, extends,"),
        ({"p": {"requires": {"gpu": 1}}}, "profile 'p', requires has an unknown key 'gpu': known: device, min_release"),
        ({"p": {"args": ["a"]}}, "profile 'p', args is ['a']: expected a mapping"),
        ({"p": "text"}, "profile 'p' is 'text': expected a mapping"),
        ({"p": {"extends": ["q"]}, "q": {}}, "profile 'p'"),
        ([], "sglang_profiles is []: expected a mapping"),
        ({"../p": {}}, "expected"),
    ],
)
def test_what_is_no_profile_is_refused(profiles, text):
    name = "../p" if "../p" in profiles else "p"
    message = refusal(resolve_profile, profiles, name)
    assert ("a name holds letters" if name == "../p" else text) in message


# -- flags ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, ["--f"]),
        (False, None),
        (None, None),
        ("text", ["--f", "text"]),
        ("", ["--f", ""]),
        (7, ["--f", "7"]),
        (0, ["--f", "0"]),
        (0.92, ["--f", "0.92"]),
        (-1, ["--f=-1"]),
        (-0.5, ["--f=-0.5"]),
        ("--x", ["--f=--x"]),
        ("-", ["--f=-"]),
        (["a", "b c", 3], ["--f", "a", "b c", "3"]),
        (["-1"], ["--f=-1"]),
        ({"b": 1, "a": "ü"}, ["--f", '{"a": "ü", "b": 1}']),
        ({"a": {"n": [True, None]}}, ["--f", '{"a": {"n": [true, null]}}']),
    ],
)
def test_a_value_becomes_words(value, words):
    assert flags({"f": value}) == ([] if words is None else [words])


def test_flags_are_sorted_by_name_whatever_the_order_of_the_file():
    args = {"mem-fraction-static": 0.9, "enable-metrics": True, "a": 1}
    expected = [["--a", "1"], ["--enable-metrics"], ["--mem-fraction-static", "0.9"]]
    assert flags(args) == expected
    assert flags(dict(reversed(args.items()))) == expected


@pytest.mark.parametrize("value", [[True], ["a", False], [None], [["a"]], [{"a": 1}]])
def test_a_list_holds_text_and_numbers_only(value):
    message = refusal(flags, {"f": value}, kind=AnsibleTypeError)
    assert message.startswith("flag f has ")
    assert message.endswith("expected true, false, text, a number, a mapping, or a list of text and numbers")


@pytest.mark.parametrize("value", ["a\0b", ["a", "\0"]])
def test_a_nul_is_refused(value):
    assert refusal(flags, {"f": value}) == "flag f holds a NUL character, which no argument can"


@pytest.mark.parametrize(
    ("name", "fixed"), [("--port", "port"), ("Mem_Fraction", "mem-fraction"), ("a b", "a-b"), (1.5, "1-5"), ("a\n", "a")]
)
def test_a_name_that_is_no_flag_is_refused_with_one_that_is(name, fixed):
    assert refusal(flags, {name: 1}) == f"flag '{name}': expected its name in lower case, single dashes inside: '{fixed}'"


def test_a_name_that_is_no_text_among_others_is_refused():
    # `on: 1` in YAML 1.1 is a key of type bool.
    assert refusal(flags, {"a": 1, True: 1}).startswith("flag 'True': expected its name")


@pytest.mark.parametrize(
    ("release", "spelled"),
    [
        ("0.5.9", "--mamba-scheduler-strategy"),
        ("0.5.13.post1", "--mamba-scheduler-strategy"),
        ("0.5.14.dev1", "--mamba-scheduler-strategy"),
        ("0.5.14", "--mamba-radix-cache-strategy"),
        ("0.5.17", "--mamba-radix-cache-strategy"),
        ("0.5.23", "--mamba-radix-cache-strategy"),
    ],
)
def test_a_flag_is_spelled_for_its_release(fleet_data, release, spelled):
    words = flags({"mamba-radix-cache-strategy": "extra_buffer"}, fleet_data["sglang_releases"], release)
    assert words == [[spelled, "extra_buffer"]]


def test_a_flag_renamed_twice_has_the_spelling_of_each_time():
    releases = {"flag_spellings": {"c": [{"before": "1.0", "spelled": "a"}, {"before": "2.0", "spelled": "b"}]}}
    assert [flags({"c": 1}, releases, release)[0][0] for release in ("0.9", "1.0", "1.9.post1", "2.0")] == [
        "--a", "--b", "--b", "--c",
    ]  # fmt: skip


def test_changes_between_two_command_lines():
    before = [["--same", "1"], ["--gone"], ["--changed", "1", "2"], ["--negative=-1"]]
    after = [["--same", "1"], ["--changed", "1", "3"], ["--negative=-2"], ["--new"]]
    assert flag_changes(before, after) == [
        "gone: set -> unset",
        "changed: 1 2 -> 1 3",
        "negative: -1 -> -2",
        "new: unset -> set",
    ]
    assert flag_changes(after, after) == []


# -- launch spec ------------------------------------------------------------------------------------------------------
@pytest.fixture
def request_for(fleet_data):
    """The request for a server of a four-GPU node, with some of it changed."""
    tiny = {**fleet_data["sglang_models"]["tiny"], "path": "/srv/sglang/models/tiny"}
    models = {**fleet_data["sglang_models"], "tiny": tiny}

    def _request(**changes):
        return {
            "name": "node1-gpu0",
            "node": "node1",
            "slug": "sglang_gpu0",
            "gpus": [0],
            "host": "127.0.0.1",
            "port": 30000,
            "root": "/srv/sglang",
            "profile": "nomtp",
            "profiles": fleet_data["sglang_profiles"],
            "model": "qwen3.6-27b",
            "models": models,
            "devices": fleet_data["sglang_devices"],
            "releases": fleet_data["sglang_releases"],
            "engine": {"venv": "/opt/venv", "device": "cuda", "release": "0.5.17"},
            "args": {},
            "env": {},
            "secrets": [],
            "found": {},
            **changes,
        }

    return _request


def engine(device="cuda", release="0.5.17"):
    return {"venv": "/opt/venv", "device": device, "release": release}


def words_of(spec, name):
    return next((line[1:] for line in spec["flags"] if line[0].partition("=")[0] == f"--{name}"), None)


def test_the_command_line_of_a_plain_server(request_for):
    spec = launch_spec(request_for())
    assert spec["argv"][:3] == spec["command"] == ["/opt/venv/bin/python", "-m", "sglang.launch_server"]
    assert spec["argv"][3:] == [word for line in spec["flags"] for word in line]
    assert [line[0] for line in spec["flags"]] == [
        "--model-path", "--served-model-name", "--host", "--port",
        "--enable-metrics", "--mamba-radix-cache-strategy", "--max-mamba-cache-size", "--max-running-requests",
        "--mem-fraction-static", "--reasoning-parser",
    ]  # fmt: skip
    assert words_of(spec, "mem-fraction-static") == ["0.85"]
    assert spec["env"] == {
        "SGLANG_FLEET_ROOT": "/srv/sglang",
        "SGLANG_FLEET_SERVER": "node1-gpu0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert spec["script"] == "/srv/sglang/scripts/start_sglang_gpu0_nomtp.sh"
    assert spec["url"] == "http://127.0.0.1:30000"
    assert (spec["release"], spec["asked_running"], spec["hybrid"], spec["warnings"]) == ("0.5.17", 48, True, [])


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://127.0.0.1:30000"),
        ("::1", "http://[::1]:30000"),
        ("10.0.0.1", "http://10.0.0.1:30000"),
    ],
)
def test_the_url_is_one_that_this_node_can_ask(request_for, host, url):
    assert launch_spec(request_for(host=host))["url"] == url


def test_the_nearer_layer_wins_and_null_takes_a_flag_out(request_for):
    spec = launch_spec(request_for(args={"mem-fraction-static": 0.5, "enable-metrics": None, "reasoning-parser": False}))
    assert words_of(spec, "mem-fraction-static") == ["0.5"]
    assert words_of(spec, "enable-metrics") is None
    assert words_of(spec, "reasoning-parser") is None


def test_flags_of_the_state_cache_only_go_to_hybrid_models(request_for, fleet_data):
    models = copy.deepcopy(fleet_data["sglang_models"])
    models["qwen3.6-27b"]["hybrid"] = False
    spec = launch_spec(request_for(models=models))
    assert words_of(spec, "max-mamba-cache-size") is None
    assert words_of(launch_spec(request_for()), "max-mamba-cache-size") == ["90"]


def test_an_unmet_device_is_refused_with_the_profiles_that_would_do(request_for):
    message = refusal(launch_spec, request_for(profile="mtp", engine=engine("cpu")))
    assert message == ("profile 'mtp' cannot run on node1-gpu0: needs device cuda, found cpu; profiles that would do: nomtp")


def test_an_unmet_release_is_refused_with_the_profiles_that_would_do(request_for):
    profiles = {
        "new": {"requires": {"min_release": "0.5.20", "device": ["cpu", "xpu"]}},
        "old": {"requires": {"min_release": "0.5.17"}},
        "hidden": {"abstract": True},
    }
    assert refusal(launch_spec, request_for(profiles=profiles, profile="new")) == (
        "profile 'new' cannot run on node1-gpu0: needs device cpu or xpu, found cuda; needs SGLang 0.5.20 or later,"
        " found 0.5.17; profiles that would do: old"
    )
    none = {"new": profiles["new"]}
    assert refusal(launch_spec, request_for(profiles=none, profile="new")).endswith("profiles that would do: none")
    assert launch_spec(request_for(profiles=profiles, profile="old"))["profile"] == "old"


def test_a_release_that_is_none_is_refused(request_for):
    profiles = {"p": {"requires": {"min_release": "newest"}}}
    message = refusal(launch_spec, request_for(profiles=profiles, profile="p"))
    assert message == "requires.min_release is 'newest': expected an SGLang release such as 0.5.17"


@pytest.mark.parametrize("flag", sorted(sglang_profile.OWNED_FLAGS))
def test_a_flag_of_the_inventory_is_refused_in_a_profile_with_its_source(request_for, flag):
    message = refusal(launch_spec, request_for(args={flag: "x"}))
    source = sglang_profile.OWNED_FLAGS[flag]
    assert message == f"node1-gpu0, args sets {flag}, which comes from {source}: take it out"


def test_an_owned_flag_in_each_layer_names_that_layer(request_for, fleet_data):
    devices = {**fleet_data["sglang_devices"], "cuda": {"args": {"port": 1}}}
    assert refusal(launch_spec, request_for(devices=devices)).startswith("sglang_devices.cuda, args sets port,")
    profiles = {"p": {"hybrid_args": {"host": "::"}}}
    message = refusal(launch_spec, request_for(profiles=profiles, profile="p"))
    assert message.startswith("profile 'p', hybrid_args sets host,")


@pytest.mark.parametrize("name", ["1A", "A-B", "", "A B", "É", "A\n"])
def test_a_name_that_no_variable_can_have_is_refused(request_for, name):
    message = refusal(launch_spec, request_for(env={name: "x"}))
    assert message == f"node1-gpu0, env: '{name}' is not a name that an environment variable can have"


@pytest.mark.parametrize("name", sglang_profile.OWNED_ENV)
def test_a_variable_of_the_fleet_is_refused(request_for, name):
    message = refusal(launch_spec, request_for(env={name: "x"}))
    assert message == f"node1-gpu0, env: {name} is set by the fleet from the inventory, take it out"


@pytest.mark.parametrize("value", [True, ["a"], {"a": 1}])
def test_a_variable_is_text_or_a_number(request_for, value):
    message = refusal(launch_spec, request_for(env={"A": value}), kind=AnsibleTypeError)
    assert message == f"node1-gpu0, env: A is {value!r}: expected text or a number (quote true and false)"


def test_environment_layers_merge_and_null_takes_out(request_for, fleet_data):
    cpu = request_for(model="tiny", gpus=[], engine=engine("cpu"), env={"OMP_NUM_THREADS": 4, "HF_HUB_OFFLINE": None})
    env = launch_spec(cpu)["env"]
    assert env["OMP_NUM_THREADS"] == "4"
    assert "HF_HUB_OFFLINE" not in env
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert refusal(launch_spec, request_for(env={"A": "\0"})).endswith("A holds a NUL character, which no environment can")


def test_what_the_engine_needs_is_the_lowest_layer_of_the_environment(request_for):
    needs = {"PYTHONPATH": "/opt/site", "HF_HUB_OFFLINE": 0, "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}
    request = request_for(engine={**engine(), "env": needs}, env={"HF_HUB_OFFLINE": 1, "LD_LIBRARY_PATH": None})
    env = launch_spec(request)["env"]
    assert env["PYTHONPATH"] == "/opt/site"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "LD_LIBRARY_PATH" not in env
    assert refusal(launch_spec, request_for(engine={**engine(), "env": {"CUDA_VISIBLE_DEVICES": "0"}})) == (
        "sglang_engine_env: CUDA_VISIBLE_DEVICES is set by the fleet from the inventory, take it out"
    )


def test_the_release_found_must_be_the_one_declared(request_for):
    found = {"engine": {"release": "0.5.18"}}
    assert refusal(launch_spec, request_for(found=found)) == (
        "node1-gpu0: the engine at /opt/venv is SGLang 0.5.18 and the inventory says 0.5.17:"
        " correct sglang_engine_release, or point sglang_engine_venv to the right one"
    )
    assert launch_spec(request_for(found=found, engine=engine(release="")))["release"] == "0.5.18"
    assert launch_spec(request_for(found={"engine": {"release": None}}))["release"] == "0.5.17"
    assert launch_spec(request_for(found={"engine": {"release": "0.5.17"}}))["release"] == "0.5.17"


def test_an_engine_without_requests_is_refused_with_the_command_that_helps(request_for):
    found = {"engine": {"release": "0.5.17", "requests": None}}
    assert refusal(launch_spec, request_for(found=found)) == (
        "node1-gpu0: the engine at /opt/venv has no Python package requests, which the fleet's modules speak HTTP with:"
        " /opt/venv/bin/python -m pip install requests"
    )


def test_without_any_release_the_newest_known_is_planned_for(request_for, fleet_data):
    assert launch_spec(request_for(engine=engine(release="")))["release"] == fleet_data["sglang_releases"]["known"][-1]


@pytest.mark.parametrize(
    ("release", "assumed"),
    [("0.5.2", "0.5.9"), ("0.5.13.post2", "0.5.13.post1"), ("0.5.17.post1", "0.5.17"), ("0.6.0", "0.5.23")],
)
def test_an_unknown_release_is_warned_of_with_what_it_is_treated_as(request_for, release, assumed):
    assert launch_spec(request_for(engine=engine(release=release)))["warnings"] == [
        f"SGLang {release} is not among the releases known here (0.5.9 to 0.5.23): treated as {assumed}"
    ]


def test_a_gpu_that_the_node_does_not_have_is_refused(request_for):
    two = {"gpus": [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]}
    assert refusal(launch_spec, request_for(gpus=[3], found=two)) == (
        "node1-gpu0: node1 has GPUs 0, 1, and the inventory asks for GPU 3: correct its gpus"
    )
    assert refusal(launch_spec, request_for(found={"gpus": []})) == (
        "node1-gpu0: node1 has no GPU that its driver shows, and the inventory asks for GPU 0: correct its gpus"
    )
    assert launch_spec(request_for(gpus=[3], found={}))["gpus"] == [3]


def test_one_gpu_is_pinned_by_uuid_and_several_by_index(request_for):
    found = {"gpus": [{"index": index, "uuid": f"GPU-{index}"} for index in range(4)]}
    one = launch_spec(request_for(gpus=[2], found=found))
    assert one["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    assert words_of(one, "tp-size") is None
    three = launch_spec(request_for(gpus=[1, 2, 3], found=found))
    assert three["env"]["CUDA_VISIBLE_DEVICES"] == "1,2,3"
    assert words_of(three, "tp-size") == ["3"]
    assert three["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_cuda_server_without_gpus_is_refused(request_for):
    assert refusal(launch_spec, request_for(gpus=[])) == (
        "node1-gpu0 has no gpus and its engine is for cuda: name its GPUs in the inventory"
    )


def test_a_cpu_server_is_told_its_device(request_for):
    spec = launch_spec(request_for(model="tiny", gpus=[], engine=engine("cpu", "0.5.23")))
    assert words_of(spec, "device") == ["cpu"]
    assert words_of(spec, "max-total-tokens") == ["8192"]


def test_keys_are_named_by_file_and_never_written_out(request_for):
    spec = launch_spec(request_for(secrets=["api-key"]))
    assert words_of(spec, "config") == ["/srv/sglang/run/sglang_gpu0.secrets.yml"]
    assert words_of(launch_spec(request_for()), "config") is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"root": "srv"}, "sglang_root is 'srv': expected a folder on the node, from /"),
        ({"model": "qwen"}, "model 'qwen' is not known: did you mean 'qwen3.6-27b'? known: qwen3.6-27b, tiny (sglang_models)"),
        (
            {"models": {"qwen3.6-27b": {"path": "m"}}},
            "model 'qwen3.6-27b': path is 'm': expected the model's folder on the node",
        ),
        (
            {"models": {"qwen3.6-27b": {"path": "/m", "config": "config.json"}}},
            "model 'qwen3.6-27b': config is 'config.json': expected a mapping",
        ),
        *(
            (
                {"models": {"qwen3.6-27b": {"path": "/m", name: value}}},
                f"model 'qwen3.6-27b': {name} is {value!r}: expected GiB of all of its files, a number above 0",
            )
            for name in ("weights_gib", "draft_weights_gib")
            for value in ("29", True, 0, -1, float("nan"))
        ),
        ({"models": {"qwen3.6-27b": {"file": "/m"}}}, "model 'qwen3.6-27b' has an unknown key 'file': "),
        ({"engine": engine("gpu")}, "sglang_engine_device is 'gpu': "),
        ({"engine": engine(release="latest")}, "is 'latest': expected an SGLang release such as 0.5.17"),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(request_for, changes, text):
    assert text in refusal(launch_spec, request_for(**changes))


def test_a_model_that_the_node_cannot_load_is_refused(request_for):
    path = "/srv/models/Qwen3.6-27B"
    absent = {"models": {path: {"problem": f"there is no model folder {path}: copy it"}}}
    assert refusal(launch_spec, request_for(found=absent)) == f"node1-gpu0: there is no model folder {path}: copy it"
    empty = {"models": {path: {"problem": None, "weight_source": None}}}
    assert refusal(launch_spec, request_for(found=empty)) == (
        f"node1-gpu0: {path} holds no weights: copy the model's weight files there"
    )
    assert launch_spec(request_for(found=empty, args={"load-format": "dummy"}))["model_path"] == path
    whole = {"models": {path: {"problem": None, "weight_source": "index"}, "/another": {"problem": "/another is broken"}}}
    assert launch_spec(request_for(found=whole))["model_path"] == path


def test_layers_from_the_device_to_the_server(request_for, fleet_data):
    """Device, model, profile, the profile's flags for hybrids, server: the later wins."""
    names = ["f1", "f2", "f3", "f4", "f5"]

    def layer(number):
        return {name: number for name in names[number - 1 :]}

    spec = launch_spec(
        request_for(
            devices={"cuda": {"args": layer(1), "env": {"A": "1", "B": "1", "C": "1", "D": "1"}}},
            models={"m": {"path": "/m", "hybrid": True, "args": layer(2), "env": {"B": "2", "C": "2", "D": "2"}}},
            model="m",
            profiles={"p": {"args": layer(3), "hybrid_args": layer(4), "env": {"C": "3", "D": "3"}}},
            profile="p",
            args=layer(5),
            env={"D": "4"},
        )
    )
    assert [words_of(spec, name) for name in names] == [["1"], ["2"], ["3"], ["4"], ["5"]]
    assert [spec["env"][name] for name in "ABCD"] == ["1", "2", "3", "4"]


# -- what reaches the engine ------------------------------------------------------------------------------------------
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k[:2] == 'T_'}]))"
# Whatever UTF-8 can hold, but NUL (which is refused).
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
AWKWARD = [
    "", " ", "a b", "'", '"', "$HOME", "$(echo x)", "`echo x`", ";", "&", "|", "\n", "a\nb\n", "\r\n", "\t", "\\", "\\\n",
    "-", "--flag", "-1", "é", "漢字", "😀", "!", "#", "~", "*", "?", "[a]", "{a,b}", "{{ 1 }}", "{% x %}",
    "{# c #}", "%s", "\x7f", "\ufeff", "\u2028",
]  # fmt: skip


def spec_with(args, env):
    show = [sys.executable, "-c", SHOW]
    lines = flags(args)
    environment = dict(sorted(env.items()))
    return {"name": "n-gpu0", "profile": "p", "command": show, "flags": lines, "env": environment}


def render(root, specs):
    """The start scripts as the role renders them, with Ansible's own template lookup: one text for each spec."""
    templar = Templar(loader=DataLoader())
    template = lookup_loader.get("ansible.builtin.template", loader=templar._loader, templar=templar)
    path = str(root / "roles/sglang_server/templates/start.sh.j2")
    return [template.run([path], variables={"__sglang_server_spec": spec})[0] for spec in specs]


@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(st.tuples(ANY_TEXT, st.lists(ANY_TEXT, min_size=2, max_size=3), ANY_TEXT), min_size=12, max_size=12))
@example(batch=[(text, [text, "x", text], text) for text in AWKWARD])
def test_any_text_reaches_the_engine_unchanged(root, batch):
    specs = [spec_with({"one": one, "several": several}, {"T_A": env}) for one, several, env in batch]
    scripts = render(root, specs)
    whole = "\n".join(f"(\n{script.rstrip()}\n)" for script in scripts)
    ran = subprocess.run(["bash"], input=whole.encode(), capture_output=True, timeout=60, check=False)
    assert ran.stderr == b""
    seen = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(seen) == len(batch)
    for (one, several, env), (argv, environ) in zip(batch, seen):
        first = [f"--one={one}"] if one.startswith("-") else ["--one", one]
        assert argv == [*first, "--several", *several]
        assert environ == {"T_A": env}


def test_a_script_is_as_ansible_renders_it(root):
    """The template's lines: one flag a line, nothing after the last."""
    (text,) = render(root, [spec_with({"b": 1, "a": True}, {"T_A": "x y"})])
    assert re.search(r"^export T_A='x y'$", text, re.M)
    assert text.splitlines()[-2:] == ["  --a \\", "  --b 1"]
    assert "\n\n" not in text


def test_the_filters_are_registered_under_their_documented_names():
    registered = sglang_profile.FilterModule().filters()
    assert registered["sglang_launch_spec"] is launch_spec
    assert registered["sglang_flags"] is flags
    assert registered["sglang_flag_changes"] is flag_changes
    assert registered["sglang_resolve_profile"] is resolve_profile
    with pytest.raises(AnsibleFilterError):
        registered["sglang_flags"]({"A": 1})


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("max-total-tokens", -5, "expected 1 or more"),
        ("max-running-requests", "0", "expected 1 or more"),
        ("context-length", 0, "expected 1 or more"),
        ("chunked-prefill-size", 0, "expected 1 or more, or -1 for none"),
        ("hicache-size", -1, "expected 0 or more"),
        ("mem-fraction-static", 0, "expected a share of the GPU's memory, above 0 and below 1"),
        ("mem-fraction-static", 92, "expected a share of the GPU's memory, above 0 and below 1"),
        ("speculative-num-steps", "nan", "expected 1 or more"),
    ],
)
def test_a_number_that_cannot_be_is_refused(request_for, flag, value, expected):
    with pytest.raises(AnsibleFilterError, match=f"^node1-gpu0: {flag} is {value}: {expected}$"):
        launch_spec(request_for(args={flag: value}))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("chunked-prefill-size", -1),
        ("hicache-size", 0),
        ("max-total-tokens", "8192"),
        ("hicache-ratio", 0.5),
        ("page-size", None),
    ],
)
def test_a_number_that_can_be_is_taken(request_for, flag, value):
    assert flag in launch_spec(request_for(args={flag: value}))["args"]
