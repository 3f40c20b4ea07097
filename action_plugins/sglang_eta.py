# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter sglang_eta as a task, with what is kept on the controller of the fleet's speeds."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import filter_loader

ASKED = ("samples", "output_tokens", "done", "tok_s")


class ActionModule(ActionBase):
    """See ``ansible-doc sglang_eta``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = self._task.args
        asked = {name: arguments[name] for name in ASKED if arguments.get(name) is not None}
        for name in ("samples", "output_tokens"):
            if name not in asked:
                raise AnsibleActionFail(
                    f"eta.yml needs -e {name}=…: samples is how many generations, output_tokens of how many"
                )
        if "tok_s" in asked and arguments.get("live") is not None:
            raise AnsibleActionFail(
                f"-e tok_s={asked['tok_s']} gives the fleet's speed and -e live=true reads it: leave one of them out"
            )
        profile, known = arguments.get("profile"), arguments.get("known") or []
        if profile and profile not in known:
            raise AnsibleActionFail(f"profile {profile!r} is not known: known are {', '.join(known)}")
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        eta, show = (filter_loader.get(name).j2_function for name in ("sglang_eta", "sglang_eta_report"))
        try:
            if arguments.get("check_only"):
                eta([], now=now, **{"tok_s": 1e9, **asked})
                result.update(changed=False)
                return result
            servers = [] if "tok_s" in asked else self._speeds(arguments)
            gpus = [{"name": one["name"], "gpus": max(1, one["gpus"]), "tok_s": None} for one in arguments["servers"]]
            told = eta(servers or gpus, now=now, **asked)
            result.update(changed=False, eta=told, servers=servers, text=show(told, servers))
        except AnsibleError as error:
            raise AnsibleActionFail(error.message) from None
        return result

    def _speeds(self, arguments):
        """What is known of each server's speed: read live, or from records."""
        known, records, boots = arguments["servers"], [], {}
        for folder in dict.fromkeys(arguments["folders"]):
            records += [record for record in _read(folder, "compare") if record.get("kind") == "measured"]
            records += [_as_measured(record) for record in _read(folder, "benchmarks") if _is_own(record)]
            boots.update({boot["server"]: boot for boot in _read(folder, "boots")})
        servers = []
        for one in known:
            boot = boots.get(one["name"]) or {}
            servers.append(
                {
                    **one,
                    "profile": one["asked_profile"] or boot.get("profile") or one["profile"],
                    "kind": [boot["gpu"]] * one["gpus"] if boot.get("gpu") else None if one["gpus"] else [],
                }
            )
        if arguments.get("live") is None:
            told = filter_loader.get("sglang_speeds").j2_function(servers, records, arguments["output_tokens"])
            for one in told:
                # A profile that the inventory has no more can't be asked for.
                one["known_profiles"] = [name for name in one["known_profiles"] if name in (arguments.get("known") or [name])]
            return told
        live = {entry["name"]: entry for entry in arguments["live"]}
        read = [_live(server, live.get(server["name"])) for server in servers]
        if all(one["tok_s"] is None for one in read):
            why = "; ".join(f"{one['name']}: {one['source']}" for one in read)
            # None of them answered: there is nothing to send requests to.
            start = "" if any(one["concurrency"] is not None for one in read) else "start it with deploy.yml, "
            raise AnsibleActionFail(
                f"no server's counters give a speed ({why}): {start}send it the job's requests"
                " and read again, or leave -e live=true out for what was measured"
            )
        return read


def _live(server, told):
    told = told or {"tok_s": None, "running": None, "detail": "its node gave no answer"}
    return {
        "name": server["name"],
        "gpus": max(1, server["gpus"]),
        "profile": server["profile"],
        "tok_s": told["tok_s"],
        "concurrency": told["running"],
        "workload": None,
        "source": told["detail"] or "its own counters, as it runs now",
    }


def _read(folder, kind):
    """Records of a kind, oldest first. One that can't be read is no record."""
    found = []
    for path in sorted((Path(folder) / kind).glob("*/*.json"), key=lambda path: path.name):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("schema") == 1:
            found.append(record)
    return found


def _is_own(record):
    """Of benchmark.yml and deploy.yml; what compare.yml measures has records of its own."""
    return record.get("outcome") == "measured" and "comparison" not in record["labels"]


def _as_measured(record):
    """A record of role sglang_benchmark in the form of one of compare.yml."""
    labels, asked = record["labels"], record["asked"]
    sent = {name: asked[name] for name in ("input_tokens", "output_tokens", "prompts_per_concurrency", "min_prompts")}
    return {
        "kind": "measured",
        "at": record["measured_at"],
        "series": "",
        "server": record["server"],
        **{name: labels.get(name) for name in ("node", "profile", "model", "release", "launch_sha256")},
        "gpus": labels.get("gpus") or [],
        "workload": {
            "id": json.dumps(sent),
            "name": "benchmark",
            "source": "prompts" if asked.get("prompts_sha256") else "random",
            "prompts": None,
            **sent,
        },
        "runs": record["runs"],
    }
