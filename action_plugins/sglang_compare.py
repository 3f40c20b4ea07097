# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What compare.yml and report.yml do on the controller: what is still to be measured, the records, and the report.

Records are files that are written once and never changed. All that a later run needs to go on is in them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import math
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader
from ansible.utils.display import Display

SCHEMA = 1
SWEEPS = ("short", "long", "both")
SHAPE = ("input_tokens", "output_tokens")

display = Display()


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_compare``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        steps = {"workloads": workloads, "todo": todo, "keep": keep, "report": report}
        step = arguments.pop("do", None)
        if step not in steps:
            raise AnsibleActionFail(f"do is {step!r}: expected {', '.join(steps)}")
        try:
            result.update(changed=False, **steps[step](**arguments))
        except AnsibleError as error:
            raise AnsibleActionFail(error.message) from None
        return result


def workloads(
    sweep, shapes, concurrencies, repeats, profiles, known, prompts_per_concurrency, min_prompts, prompts="", called_from="."
):
    """What to send: one workload a shape, with an id that is the same for the same load. Refuses what can't be measured."""
    if not isinstance(profiles, list) or not profiles:
        raise AnsibleActionFail(
            f'compare.yml needs profiles to compare: add -e \'{{"profiles": ["nomtp", "mtp"]}}\'; known are {", ".join(known)}'
        )
    unknown = [name for name in profiles if name not in known]
    if unknown:
        raise AnsibleActionFail(f"profile {unknown[0]!r} is not known: known are {', '.join(known)}")
    twice = [name for name in profiles if profiles.count(name) > 1]
    if twice:
        raise AnsibleActionFail(f"-e profiles names {twice[0]} twice: name each profile once; -e repeats measures it again")
    if sweep not in SWEEPS:
        raise AnsibleActionFail(f"-e sweep is {sweep!r}: expected {', '.join(SWEEPS)}")
    if len(profiles) == 1:
        display.warning(f"-e profiles names {profiles[0]} alone: it is measured, and compared to nothing")
    _whole_numbers("-e repeats", [repeats])
    concurrencies = _list(concurrencies)
    _whole_numbers("-e concurrencies", concurrencies or [concurrencies])
    twice = [at for at in concurrencies if concurrencies.count(at) > 1]
    if twice:
        raise AnsibleActionFail(
            f"-e concurrencies names {twice[0]} twice: name each concurrency once; -e repeats measures it again"
        )
    _whole_numbers("prompts_per_concurrency and min_prompts", [prompts_per_concurrency, min_prompts])
    source = _prompts(prompts, called_from, max(max(concurrencies) * prompts_per_concurrency, min_prompts))
    found = []
    for name in ("short", "long") if sweep == "both" else (sweep,):
        shape = shapes.get(name)
        if not isinstance(shape, dict) or sorted(shape) != sorted(SHAPE):
            raise AnsibleActionFail(f"sglang_compare_shapes has {shape!r} for {name}: expected input_tokens and output_tokens")
        _whole_numbers(f"sglang_compare_shapes.{name}", shape.values())
        workload = {
            "name": name,
            "source": "prompts" if source else "random",
            "prompts": source["count"] if source else None,
            "prompts_sha256": source["sha256"] if source else None,
            "input_tokens": None if source else shape["input_tokens"],
            "output_tokens": shape["output_tokens"],
            "prompts_per_concurrency": prompts_per_concurrency,
            "min_prompts": min_prompts,
        }
        text = json.dumps({key: value for key, value in workload.items() if key != "name"}, sort_keys=True)
        found.append({"id": hashlib.sha256(text.encode()).hexdigest()[:12], **workload})
    if source and len(found) > 1 and found[0]["id"] == found[1]["id"]:
        found.pop()
    return {"workloads": found, "concurrencies": concurrencies, "prompts": source["path"] if source else ""}


def _list(numbers):
    """A number, or numbers with commas as -e has them, as a list."""
    if isinstance(numbers, str):
        return [int(word) if word.strip().isdecimal() else word for word in numbers.split(",")]
    return numbers if isinstance(numbers, list) else [numbers]


def _whole_numbers(what, values):
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AnsibleActionFail(f"{what} has {value!r}: expected whole numbers above 0")


def _prompts(prompts, called_from, most):
    """Path, sha256 and count of a file of prompts; None without one."""
    if not prompts:
        return None
    path = Path(called_from, prompts).expanduser()
    try:
        content = path.read_bytes()
        count = len(_reader()(content.decode("utf-8")))
    except OSError as error:
        raise AnsibleActionFail(f"-e prompts: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AnsibleActionFail(f"-e prompts: {path} is not UTF-8: expected JSON lines") from None
    except ValueError as error:
        raise AnsibleActionFail(
            f'-e prompts: {path}: {error}: expected a JSON mapping a line, such as {{"prompt": "…"}} or {{"messages": […]}}'
        ) from None
    if count < most:
        raise AnsibleActionFail(
            f"-e prompts: {path} has {count} prompts and the largest concurrency sends {most}: give more prompts, or lower"
            " concurrencies or sglang_compare_prompts_per_concurrency"
        )
    return {"path": str(path), "sha256": hashlib.sha256(content).hexdigest(), "count": count}


def _reader():
    """The reader of prompts that the node has too: what passes here passes there."""
    path = Path(__file__).resolve().parents[1] / "module_utils" / "sglang_benchmark.py"
    spec = importlib.util.spec_from_file_location("sglang_benchmark_of_nodes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read_prompts


def todo(folder, server, launches, workloads, concurrencies, repeats, release, model, gpus, runs_now=None, fresh=False):
    """What of a comparison is not measured yet on a server, in turns A B C A B C, and what an interrupted run left to do."""
    records = _of_server(folder, server)
    wanted = {workload["id"] for workload in workloads}
    like_this = [
        record for record in records if (record.get("release"), record.get("model"), record["gpus"]) == (release, model, gpus)
    ]
    alike = [record for record in like_this if record["kind"] == "measured" and record["workload"]["id"] in wanted]
    # A series that was begun and cut before it had anything is gone on with too.
    begun = [
        record
        for record in like_this
        if record["kind"] == "begin" and wanted & {workload["id"] for workload in record["workloads"]}
    ]
    series = max((record["series"] for record in alike + begun), default=None)
    now = _now()
    if fresh or series is None:
        series = now
    have = {
        (record["profile"], record["launch_sha256"], record["workload"]["id"], record["repeat"], run["concurrency"])
        for record in alike
        if record["series"] == series
        for run in record["runs"]
        if not run["failed"]
    }
    turns, measured_already = [], 0
    for repeat in range(1, repeats + 1):
        for profile, launch in launches.items():
            left = []
            for workload in workloads:
                missing = [at for at in concurrencies if (profile, launch, workload["id"], repeat, at) not in have]
                measured_already += len(concurrencies) - len(missing)
                if missing:
                    left.append({"workload": workload, "concurrencies": missing})
            if left:
                turns.append({"profile": profile, "repeat": repeat, "todo": left})
    busy = (runs_now or {}).get("running")
    if turns and busy:
        display.warning(
            f"{server} has {busy} requests running: it is stopped all the same, and they get the stop's time to finish"
        )
    return {
        "series": series,
        "turns": turns,
        "measured_already": measured_already,
        "before": _before(records, runs_now, launches),
    }


def _before(records, runs_now, launches):
    """What to put back: what ran before an interrupted run that is not put back yet, unless something else was deployed since.

    ``runs_now``: the server's entry of module sglang_server_info.
    """
    now = runs_now or {}
    begun = None
    for record in records:
        if record["kind"] == "begin":
            begun = record
        elif record["kind"] == "end" and record["put_back"]:
            begun = None
    if begun is None:
        return {**now, "of": None}
    launch = (now.get("started_with") or {}).get("launch_sha256") if now.get("pid") else None
    # What a comparison started itself, or nothing: it was cut. Anything else was deployed since, and stays.
    if launch is None or launch in begun["launches"].values() or launch in launches.values():
        return {**begun["before"], "of": begun["at"]}
    return {**now, "of": None}


def _now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def keep(folder, record):
    """Write one record. The time is in its name, and a name that is taken is never written again."""
    record = {"schema": SCHEMA, "at": _now(), **record}
    home = Path(folder) / "compare" / record["server"]
    try:
        home.mkdir(parents=True, exist_ok=True)
        path = home / f"{record['at'].replace('-', '').replace(':', '')}.json"
        with path.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(_strict(record), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise AnsibleActionFail(f"the record of {record['server']} can't be kept: {home}: {error.strerror}") from None
    return {"record": record, "path": str(path)}


def _strict(value):
    if isinstance(value, dict):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_server(folder, server):
    """A server's records, oldest first. One that can't be read is a warning: it would be measured again."""
    found = []
    for path in sorted((Path(folder) / "compare" / server).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            display.warning(f"{path} is no record and was left out: {error}")
            continue
        if isinstance(record, dict) and record.get("schema") == SCHEMA:
            found.append(record)
        else:
            display.warning(f"{path} is a record of another version and was left out")
    return found


def report(folders, servers, out, required=False, profiles=None):
    """The comparisons of some servers as data and text, and as a page where matplotlib is there to draw it."""
    records = [record for folder in dict.fromkeys(folders) for server in servers for record in _of_server(folder, server)]
    comparisons = filter_loader.get("sglang_comparisons").j2_function(records, profiles)
    text = filter_loader.get("sglang_compare_report").j2_function(comparisons)
    if not comparisons:
        if required:
            of = f" of {', '.join(profiles)}" if profiles else ""
            raise AnsibleActionFail(f"nothing was measured yet{of} on {', '.join(servers)}: compare.yml measures profiles")
        return {"comparisons": [], "text": text, "page": None}
    made_at = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    try:
        html = filter_loader.get("sglang_compare_page").j2_function(comparisons, made_at)
    except AnsibleError as error:
        if required:
            raise
        display.warning(f"no page was made: {error.message}; then report.yml makes it")
        return {"comparisons": comparisons, "text": text, "page": None}
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise AnsibleActionFail(f"the report can't be written to {path}: {error.strerror}; -e out=FILE names another") from None
    return {"comparisons": comparisons, "text": text, "page": str(path)}
