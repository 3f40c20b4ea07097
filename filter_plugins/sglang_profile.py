# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profiles are data; what a server is started with is worked out here: profile -> flags -> argv.

Pure functions: what they need comes in, nothing is read or written. Each filter has a page beside this file
(``ansible-doc -t filter sglang_flags``).
"""

from __future__ import annotations

import difflib
import json
import math
import re

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from packaging.version import InvalidVersion, Version

PROFILE_KEYS = ("extends", "abstract", "description", "requires", "args", "hybrid_args", "env")
REQUIRES_KEYS = ("device", "min_release")
MODEL_KEYS = ("path", "served_name", "hybrid", "config", "weights_gib", "draft_weights_gib", "args", "env")
PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
FLAG_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Flags that the inventory decides, with the variable that does.
OWNED_FLAGS = {
    "model-path": "sglang_models[…].path",
    "served-model-name": "sglang_models[…].served_name",
    "host": "sglang_host",
    "port": "the server's port in the inventory",
    "device": "sglang_engine_device",
    "tp-size": "the server's gpus in the inventory",
    "tensor-parallel-size": "the server's gpus in the inventory",
    "api-key": "sglang_api_key, which keeps it out of the command line",
    "admin-api-key": "sglang_admin_api_key, which keeps it out of the command line",
    "config": "sglang_api_key and sglang_admin_api_key",
}
# Flags whose value is a number with a least one, and those that are a share. A value below it is taken by SGLang's parser
# and fails much later in other words, such as that there is no memory.
LEAST = {
    **dict.fromkeys(
        (
            "chunked-prefill-size", "context-length", "cuda-graph-max-bs", "dp-size", "ep-size", "max-mamba-cache-size",
            "max-prefill-tokens", "max-running-requests", "max-total-tokens", "page-size", "pp-size",
            "speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-num-steps", "stream-interval",
            "tokenizer-worker-num",
        ),
        1,
    ),
    **dict.fromkeys(("cpu-offload-gb", "hicache-ratio", "hicache-size", "schedule-conservativeness"), 0),
}  # fmt: skip
OFF = {"chunked-prefill-size": -1}  # a value below the least that means something
SHARES = ("mem-fraction-static",)
OWNED_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SGLANG_FLEET_SERVER", "SGLANG_FLEET_ROOT")


def _mapping(what, value):
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AnsibleTypeError(f"{what} is {value!r}: expected a mapping")
    return value


def _near(name, known):
    """The known names, a close match first: the tail of an error about an unknown name."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(close + [other for other in known if other not in close]) or 'none'}"


def _check_keys(what, mapping, known):
    for key in mapping:
        if key not in known:
            raise AnsibleFilterError(f"{what} has an unknown key '{key}': {_near(key, known)}")


def _release(what, value):
    try:
        return Version(str(value))
    except InvalidVersion:
        raise AnsibleFilterError(f"{what} is {value!r}: expected an SGLang release such as 0.5.17") from None


def deployable(profiles):
    """Names of the profiles that can be deployed: all but the abstract ones, in the order of the file."""
    return [name for name, profile in profiles.items() if not (isinstance(profile, dict) and profile.get("abstract"))]


def resolve_profile(profiles, name):
    """A profile with everything it extends merged in, nearest last."""
    profiles = _mapping("sglang_profiles", profiles)
    if name not in deployable(profiles):
        raise AnsibleFilterError(f"profile '{name}' is not known: {_near(name, deployable(profiles))}")
    if not PROFILE_NAME.match(str(name)):
        raise AnsibleFilterError(f"profile '{name}': a name holds letters, digits, '_' and '-' only (it names a file)")
    chain = []
    while name is not None:
        what = f"profile '{name}'"
        if name in chain:
            raise AnsibleFilterError(f"profile '{chain[0]}' extends itself: {' -> '.join([*chain, name])}")
        if not isinstance(name, str) or name not in profiles:
            raise AnsibleFilterError(f"profile '{chain[-1]}' extends '{name}', which is not there: {_near(name, profiles)}")
        profile = _mapping(what, profiles[name])
        _check_keys(what, profile, PROFILE_KEYS)
        chain.append(name)
        name = profile.get("extends")
    resolved = {"name": chain[0], "description": profiles[chain[0]].get("description", "")}
    for key in ("requires", "args", "hybrid_args", "env"):
        resolved[key] = {}
        for ancestor in reversed(chain):
            resolved[key].update(_mapping(f"profile '{ancestor}', {key}", profiles[ancestor].get(key)))
    _check_keys(f"profile '{chain[0]}', requires", resolved["requires"], REQUIRES_KEYS)
    return resolved


def unmet(requires, device, release):
    """Why an engine cannot run a profile with these ``requires``: a list of half-sentences, empty when it can."""
    reasons = []
    devices = requires.get("device")
    if devices is not None and device not in ([devices] if isinstance(devices, str) else devices):
        reasons.append(f"needs device {devices if isinstance(devices, str) else ' or '.join(devices)}, found {device}")
    least = requires.get("min_release")
    if least is not None and _release("the engine's release", release) < _release("requires.min_release", least):
        reasons.append(f"needs SGLang {least} or later, found {release}")
    return reasons


def spell(flag, releases, release):
    """How ``release`` spells a flag that profiles call by its newest name."""
    for spelling in _mapping("flag_spellings", releases.get("flag_spellings")).get(flag, []):
        if _release("the engine's release", release) < _release("flag_spellings.before", spelling["before"]):
            return spelling["spelled"]
    return flag


def _words(flag, value):
    """One flag's words: ``[]`` when it is left out."""
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [f"--{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value, ensure_ascii=False, sort_keys=True)]
    values = value if isinstance(value, list) else [value]
    words = []
    for word in values:
        if isinstance(word, bool) or not isinstance(word, (str, int, float)):
            raise AnsibleTypeError(
                f"flag {flag} has {word!r}: expected true, false, text, a number, a mapping, or a list of text and numbers"
            )
        words.append(str(word))
        if "\0" in words[-1]:
            raise AnsibleFilterError(f"flag {flag} holds a NUL character, which no argument can")
    if len(words) == 1 and words[0].startswith("-"):
        return [f"--{flag}={words[0]}"]  # apart, argparse would take it for a flag
    return [f"--{flag}", *words]


def flags(args, releases=None, release="0"):
    """Flags of a mapping, sorted by name: ``[["--mem-fraction-static", "0.92"], ["--enable-metrics"], …]``."""
    lines = []
    for name in sorted(_mapping("args", args), key=str):
        if not isinstance(name, str) or not FLAG_NAME.match(name):
            fixed = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
            raise AnsibleFilterError(f"flag '{name}': expected its name in lower case, single dashes inside: '{fixed}'")
        lines.append(_words(spell(name, releases, release) if releases else name, args[name]))
    return [line for line in lines if line]


def flag_changes(before, after):
    """What differs between two lists of flags, one sentence fragment a flag: ``"mem-fraction-static: 0.85 -> 0.92"``."""
    old, new = ({line[0].lstrip("-").partition("=")[0]: line for line in lines} for lines in (before, after))

    def shown(line):
        if line is None:
            return "unset"
        first, *rest = line
        text = " ".join([first.partition("=")[2], *rest] if "=" in first else rest) or "set"
        return text.replace("\n", "\\n")  # one line a difference

    names = [*old, *(name for name in new if name not in old)]
    return [f"{name}: {shown(old.get(name))} -> {shown(new.get(name))}" for name in names if old.get(name) != new.get(name)]


def _environment(*layers):
    merged = {}
    for what, layer in layers:
        for name, value in _mapping(what, layer).items():
            if not isinstance(name, str) or not ENV_NAME.match(name):
                raise AnsibleFilterError(f"{what}: '{name}' is not a name that an environment variable can have")
            if name in OWNED_ENV:
                raise AnsibleFilterError(f"{what}: {name} is set by the fleet from the inventory, take it out")
            if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
                raise AnsibleTypeError(f"{what}: {name} is {value!r}: expected text or a number (quote true and false)")
            if "\0" in str(value):
                raise AnsibleFilterError(f"{what}: {name} holds a NUL character, which no environment can")
            merged[name] = value
    return {name: str(value) for name, value in sorted(merged.items()) if value is not None}


def _model(models, name):
    models = _mapping("sglang_models", models)
    if name not in models:
        raise AnsibleFilterError(f"model '{name}' is not known: {_near(name, models)} (sglang_models)")
    what = f"model '{name}'"
    model = _mapping(what, models[name])
    _check_keys(what, model, MODEL_KEYS)
    if not isinstance(model.get("path"), str) or not model["path"].startswith("/"):
        raise AnsibleFilterError(f"{what}: path is {model.get('path')!r}: expected the model's folder on the node, from /")
    _mapping(f"{what}: config", model.get("config"))
    for name in ("weights_gib", "draft_weights_gib"):
        value = model.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (number and value > 0):
            raise AnsibleFilterError(f"{what}: {name} is {value!r}: expected GiB of all of its files, a number above 0")
    return model


def _only_allowed(what, args):
    for name in _mapping(what, args):
        if name in OWNED_FLAGS:
            raise AnsibleFilterError(f"{what} sets {name}, which comes from {OWNED_FLAGS[name]}: take it out")
    return args or {}


def _check_values(name, args):
    """Refuse numbers that can't be: they would be told as something else, after minutes."""
    for flag, value in args.items():
        if flag not in LEAST and flag not in SHARES:
            continue
        try:
            number = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            continue  # no number: the engine's own parser says what it takes
        if number is None or OFF.get(flag) == number:
            continue
        if flag in SHARES and not 0 < number < 1:
            raise AnsibleFilterError(f"{name}: {flag} is {value}: expected a share of the GPU's memory, above 0 and below 1")
        if flag in LEAST and not number >= LEAST[flag]:
            also = f", or {OFF[flag]} for none" if flag in OFF else ""
            raise AnsibleFilterError(f"{name}: {flag} is {value}: expected {LEAST[flag]} or more{also}")


def launch_spec(request):
    """What one server is started with, worked out from the inventory, the profile, the model and the engine."""
    engine, releases, found = request["engine"], request["releases"], request.get("found") or {}
    device, root = engine["device"], request["root"]
    release = _engine_release(request["name"], engine, found.get("engine"), releases)
    if not isinstance(root, str) or not root.startswith("/"):
        raise AnsibleFilterError(f"sglang_root is {root!r}: expected a folder on the node, from /")
    devices = _mapping("sglang_devices", request["devices"])
    if device not in devices:
        raise AnsibleFilterError(f"sglang_engine_device is '{device}': {_near(device, devices)}")
    profile = resolve_profile(request["profiles"], request["profile"])
    missing = unmet(profile["requires"], device, release)
    if missing:
        would_do = [
            name
            for name in deployable(request["profiles"])
            if not unmet(resolve_profile(request["profiles"], name)["requires"], device, release)
        ]
        raise AnsibleFilterError(
            f"profile '{profile['name']}' cannot run on {request['name']}: {'; '.join(missing)};"
            f" profiles that would do: {', '.join(would_do) or 'none'}"
        )
    model = _model(request["models"], request["model"])
    gpus = request["gpus"]
    if device == "cuda" and not gpus:
        raise AnsibleFilterError(f"{request['name']} has no gpus and its engine is for cuda: name its GPUs in the inventory")
    _check_gpus(request["name"], request["node"], gpus, found.get("gpus"))
    problem = found.get("models", {}).get(model["path"], {}).get("problem")
    if problem:
        raise AnsibleFilterError(f"{request['name']}: {problem}")
    looked = found.get("models", {}).get(model["path"])
    slug = request["slug"]
    own = {
        "model-path": model["path"],
        "served-model-name": model.get("served_name", request["model"]),
        "host": request["host"],
        "port": request["port"],
        "device": device if device != "cuda" else None,
        "tp-size": len(gpus) if len(gpus) > 1 else None,
        "config": f"{root}/run/{slug}.secrets.yml" if request["secrets"] else None,
    }
    layers = [
        (f"sglang_devices.{device}, args", devices[device].get("args")),
        (f"model '{request['model']}', args", model.get("args")),
        (f"profile '{profile['name']}', args", profile["args"]),
        (f"profile '{profile['name']}', hybrid_args", profile["hybrid_args"] if model.get("hybrid") else {}),
        (f"{request['name']}, args", request["args"]),
    ]
    chosen = {}
    for what, layer in layers:
        chosen.update(_only_allowed(what, layer))
    _check_values(request["name"], chosen)
    if looked and looked.get("weight_source") is None and chosen.get("load-format") != "dummy":
        raise AnsibleFilterError(f"{request['name']}: {model['path']} holds no weights: copy the model's weight files there")
    lines = [line for name in own for line in flags({name: own[name]}, releases, release)]
    lines += flags(chosen, releases, release)
    environment = _environment(
        ("sglang_engine_env", engine.get("env")),
        (f"sglang_devices.{device}, env", devices[device].get("env")),
        (f"model '{request['model']}', env", model.get("env")),
        (f"profile '{profile['name']}', env", profile["env"]),
        (f"{request['name']}, env", request["env"]),
    )
    if device == "cuda":
        uuids = {gpu["index"]: gpu["uuid"] for gpu in found.get("gpus") or []}
        # CUDA and nvidia-smi number GPUs differently unless told: a UUID means one card to both. With more than one,
        # SGLang reads the list as numbers and would quietly lose its fast all-reduce.
        visible = [uuids.get(gpus[0], str(gpus[0]))] if len(gpus) == 1 else [str(gpu) for gpu in gpus]
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(visible), **environment}
    host = "127.0.0.1" if request["host"] in ("0.0.0.0", "::") else request["host"]
    python = f"{engine['venv']}/bin/python"
    return {
        "name": request["name"],
        "node": request["node"],
        "slug": slug,
        "root": root,
        "profile": profile["name"],
        "model": request["model"],
        "model_path": model["path"],
        "served_model_name": own["served-model-name"],
        "hybrid": bool(model.get("hybrid", False)),
        "release": release,
        "device": device,
        "gpus": list(gpus),
        "host": request["host"],
        "port": request["port"],
        "url": f"http://{f'[{host}]' if ':' in host else host}:{request['port']}",
        "script": f"{root}/scripts/start_{slug}_{profile['name']}.sh",
        "command": [python, "-m", "sglang.launch_server"],
        "flags": lines,
        "argv": [python, "-m", "sglang.launch_server", *(word for line in lines for word in line)],
        "env": {"SGLANG_FLEET_ROOT": root, "SGLANG_FLEET_SERVER": request["name"], **environment},
        "args": {**chosen, **({"tp-size": own["tp-size"]} if own["tp-size"] else {})},
        "asked_running": chosen.get("max-running-requests"),
        "warnings": _release_warnings(releases, release),
    }


def _engine_release(name, engine, found, releases):
    """The release to plan for: the one found on the node, which must be the one declared; else the newest known."""
    declared = str(engine.get("release") or "")
    actual = str((found or {}).get("release") or "")
    if declared and actual and _release("sglang_engine_release", declared) != _release("the engine's release", actual):
        raise AnsibleFilterError(
            f"{name}: the engine at {engine['venv']} is SGLang {actual} and the inventory says {declared}:"
            " correct sglang_engine_release, or point sglang_engine_venv to the right one"
        )
    if actual and found.get("requests", True) is None:
        raise AnsibleFilterError(
            f"{name}: the engine at {engine['venv']} has no Python package requests, which the fleet's modules speak HTTP with:"
            f" {engine['venv']}/bin/python -m pip install requests"
        )
    return actual or declared or str(releases["known"][-1])


def _check_gpus(name, node, gpus, found):
    """Refuse a GPU that the node does not have. ``found`` is None where no node was asked."""
    there = [gpu["index"] for gpu in found or []]
    absent = [gpu for gpu in gpus if found is not None and gpu not in there]
    if absent:
        has = f"GPUs {', '.join(map(str, there))}" if there else "no GPU that its driver shows"
        raise AnsibleFilterError(f"{name}: {node} has {has}, and the inventory asks for GPU {absent[0]}: correct its gpus")


def _release_warnings(releases, release):
    known = [str(entry) for entry in releases.get("known", [])]
    if not known or release in known:
        return []
    newest, oldest = known[-1], known[0]
    assumed = newest if _release("the engine's release", release) > _release("known", newest) else oldest
    if _release("known", oldest) < _release("the engine's release", release) < _release("known", newest):
        assumed = max((entry for entry in known if Version(entry) < Version(release)), key=Version)
    return [f"SGLang {release} is not among the releases known here ({oldest} to {newest}): treated as {assumed}"]


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_resolve_profile": resolve_profile,
            "sglang_flags": flags,
            "sglang_flag_changes": flag_changes,
            "sglang_launch_spec": launch_spec,
        }
