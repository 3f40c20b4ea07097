# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A swap worked out: how large its batches are, what it changes on each server, whether the new profile is worse.

Pure functions. Each filter has a page beside this file (``ansible-doc -t filter sglang_swap_gate``).
"""

from __future__ import annotations

import json
import math
import statistics

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader
from ansible.utils.display import Display

# Student's t, one-sided 95 %, by degrees of freedom: half a dozen pairs are what a roll has time for.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 14: 1.761}


def _filter(name):
    return filter_loader.get(name).j2_function


def batches(count, serial):
    """Sizes of the batches that Ansible makes of ``count`` hosts with this ``serial``; the last size repeats."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise AnsibleTypeError(f"expected a number of servers, got {count!r}")
    steps = [word.strip() for word in serial.split(",")] if isinstance(serial, str) else serial
    if not isinstance(steps, list) or not steps:
        raise AnsibleTypeError(f"sglang_swap_serial is {serial!r}: expected a list such as ['1', '25%']")
    sizes, left = [], count
    while left > 0:
        step = str(steps[min(len(sizes), len(steps) - 1)])
        try:
            size = int(float(step[:-1]) / 100 * count) or 1 if step.endswith("%") else int(step)
        except ValueError:
            size = 0
        if size < 1:
            raise AnsibleFilterError(f"sglang_swap_serial has {step!r}: expected a number above 0 or a percentage, '25%'")
        sizes.append(min(size, left))
        left -= sizes[-1]
    return sizes


def gate(before, after, tolerance=5.0):
    """Is the new profile slower than the old one by more than ``tolerance`` percent, beyond the noise of paired runs?

    ``before`` and ``after``: runs of role sglang_benchmark, the i-th of both with the same prompts. The verdict is ``worse``
    when the upper end of the one-sided 95 % interval of the mean ratio lies below the tolerance, ``unclear`` when the
    tolerance lies within the interval, else ``ok``.
    """
    if not isinstance(before, list) or not isinstance(after, list):
        raise AnsibleTypeError("sglang_swap_gate needs two lists of runs")
    pairs = [(old["output_tok_s"], new["output_tok_s"]) for old, new in zip(before, after)]
    if len(pairs) < 2 or len(before) != len(after) or not all(old and new for old, new in pairs):
        raise AnsibleFilterError(
            f"the gate has {len(before)} runs before and {len(after)} after: expected as many of both, at least 2, with figures"
        )
    # Ratios are as often doubled as halved by noise: their logarithms are what is symmetrical.
    logs = [math.log(new / old) for old, new in pairs]
    freedom = len(logs) - 1
    margin = T95[max(known for known in T95 if known <= freedom)] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean, least = statistics.mean(logs), math.log(1 - float(tolerance) / 100)
    verdict = "worse" if mean + margin < least else "unclear" if mean - margin < least else "ok"
    change, low, high = (100 * (math.exp(value) - 1) for value in (mean, mean - margin, mean + margin))
    old, new = (round(statistics.median(column), 1) for column in zip(*pairs))
    return {
        "verdict": verdict,
        "before_tok_s": old,
        "after_tok_s": new,
        "change_percent": round(change, 1),
        "low_percent": round(low, 1),
        "high_percent": round(high, 1),
        "pairs": len(pairs),
        "sentence": (
            f"{new} tok/s after {old} at concurrency {before[0]['concurrency']}: {change:+.1f} %"
            f" ({low:+.1f} to {high:+.1f} by {len(pairs)} pairs; tolerated is -{float(tolerance):g} %)"
        ),
    }


def changes(before, after, values=True):
    """What a swap changes on one server, a line each: release, model, port, environment and flags, before and after.

    Without ``values`` of the environment no more than the names is told.
    """
    lines = []
    was, shall = before["record"] or {}, after["record"] or {}
    for what, old, new in (
        ("profile", before["profile"], after["profile"]),
        ("release", was.get("release"), shall.get("release")),
        ("model", was.get("model"), shall.get("model")),
        ("engine", before["argv"][0], after["argv"][0]),
    ):
        if old != new:
            lines.append(f"{what}: {old} -> {new}")
    lines += _filter("sglang_flag_changes")(was.get("flags") or [], shall.get("flags") or [])
    names = sorted({*before["env"], *after["env"]})
    lines += [
        f"{name}: {before['env'].get(name, 'unset')} -> {after['env'].get(name, 'unset')}" if values else f"{name}: changed"
        for name in names
        if before["env"].get(name) != after["env"].get(name)
    ]
    return lines


def plan_report(servers):
    """What a swap is about to change, as text. ``servers``: ``name``, ``work``, ``before``, ``after``, ``open``."""
    grouped, same = {}, []
    for server in servers:
        if not server["work"]:
            same.append(server["name"])
            continue
        lines, begun = changes(server["before"], server["after"]), server.get("open")
        if begun:
            what = "was not taken by the router" if begun.get("outcome") == "unrouted" else "is unfinished"
            since = f"a swap by {begun['who']} of {begun['begun_at']} {what}: taken up"
            if server.get("runs"):
                since += ", and what is wanted runs already and is to be proven"
            elif not lines:
                since += ", back to what ran before it"
            lines = [since, *(["compared with what ran before it:"] if lines else []), *lines]
        elif not lines:
            lines = ["keys or script"]
        # Ports differ from server to server where nothing of them changes.
        grouped.setdefault("\n".join(f"  {line}" for line in lines), []).append(server["name"])
    parts = [f"{', '.join(names)}:\n{lines}" for lines, names in grouped.items()]
    if same:
        parts.append(f"runs that already: {', '.join(same)}")
    return "\n".join(parts)


def records(files, servers):
    """Lines of history out of a controller's records of its swaps. ``files``: each its path and its text."""
    told = []
    for path, text in files:
        try:
            swap = json.loads(text)
            told += [
                {
                    "at": swap["ended_at"],
                    "server": server["name"],
                    "what": server["result"]["outcome"],
                    "who": swap["who"],
                    "run": swap["run"],
                    "before": server["from"],
                    "after": server["to"],
                    "why": server["result"].get("why"),
                }
                for server in swap["servers"]
                if server["name"] in servers and server["result"]["outcome"] not in ("unchanged", "not begun")
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"it is no JSON: {error}" if isinstance(error, ValueError) else "it is no record of a swap"
            Display().warning(f"{path} is damaged ({what}), so nothing of it is told: move it away")
    return told


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_swap_batches": batches,
            "sglang_swap_changes": changes,
            "sglang_swap_gate": gate,
            "sglang_swap_plan_report": plan_report,
            "sglang_swap_records": records,
        }
