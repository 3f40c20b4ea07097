# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a job of many generations will be done on a fleet, from speeds that were measured, read live, or given.

Pure functions. Speeds are output tokens a second; a figure is a mapping ``median``, ``min``, ``max`` and ``runs``.
"""

from __future__ import annotations

import datetime
import math
import statistics
import textwrap

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader

SCHEMA = 1
HOUR = 3600
DAY = 24 * HOUR
# A server below this share of the fleet's median speed a GPU holds it back.
HOLDS_BACK = 0.9
# Columns of a terminal of 80 beside the indentation of Ansible's own.
WIDTH = 72
# A workload whose outputs are so many times longer or shorter than the job's says little of the job.
UNLIKE = 2


def _whole(what, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnsibleTypeError(f"{what} is {value!r}: expected a whole number")
    if value < least:
        raise AnsibleFilterError(f"{what} is {value}: expected {least} or more")
    return value


def _speed(what, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise AnsibleTypeError(f"{what} is {value!r}: expected a number")
    if not math.isfinite(value) or value <= 0:
        raise AnsibleFilterError(f"{what} is {value}: expected a number above 0")
    return float(value)


def _moment(now):
    try:
        moment = datetime.datetime.fromisoformat(now)
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise AnsibleFilterError(f"now is {now!r}: expected a time with its zone, such as 2026-11-29T18:00:00+01:00")
    return moment


def _later(moment, seconds):
    try:
        return (moment + datetime.timedelta(seconds=seconds)).isoformat(timespec="minutes")
    except OverflowError:
        raise AnsibleFilterError(
            f"at this speed the job takes {seconds / DAY / 365.25:.3g} years: check samples, output_tokens and tok_s"
        ) from None


def eta(servers, samples, output_tokens, now, done=0, tok_s=None):
    """When ``samples`` generations of ``output_tokens`` are done, of which ``done`` are already.

    ``servers``: one mapping a server with ``name``, ``gpus`` (how many; 1 on the CPU) and ``tok_s`` (a figure, or None where
    nothing is known), and ``profile`` and ``known_profiles`` as ``speeds`` has them, for what is said then. ``tok_s``: a speed
    of the whole fleet, taken instead of theirs. ``now``: with its zone.
    """
    if not isinstance(servers, list):
        raise AnsibleTypeError(f"sglang_eta needs a list of servers, got {type(servers).__name__}")
    samples, output_tokens = _whole("samples", samples, 1), _whole("output_tokens", output_tokens, 1)
    if _whole("done", done, 0) > samples:
        raise AnsibleFilterError(f"done is {done} and samples is {samples}: more can't be done than there are")
    moment, tokens = _moment(now), (samples - done) * output_tokens
    known = [server for server in servers if server["tok_s"] is not None]
    if tok_s is not None:
        given = _speed("tok_s", tok_s)
        speed = {"median": given, "min": given, "max": given, "runs": 0}
        gpus = sum(server["gpus"] for server in servers)
    elif known:
        for server in known:
            _speed(f"tok_s of {server['name']}", server["tok_s"]["median"])
        speed = {key: round(sum(server["tok_s"][key] for server in known), 3) for key in ("median", "min", "max")}
        speed["runs"] = min(server["tok_s"]["runs"] for server in known)
        gpus = sum(server["gpus"] for server in known)
    else:
        raise AnsibleFilterError(
            f"no server's speed{_of_profiles(servers)}: measure it with compare.yml or benchmark.yml, read it with"
            " -e live=true, or give the fleet's with -e tok_s=…"
        )
    seconds = tokens / speed["median"]
    spread = speed["runs"] > 1
    if spread and speed["min"] <= 0:
        spread = False  # a slice without a token: there is no latest finish
    slowest, fastest = (tokens / speed["min"], tokens / speed["max"]) if spread else (None, None)
    result = {
        "schema": SCHEMA,
        "output_tokens": output_tokens,
        "tokens_left": tokens,
        "tok_s": speed,
        "tokens_an_hour": round(speed["median"] * HOUR, 1),
        "tokens_a_day": round(speed["median"] * DAY, 1),
        "hours": _hours(seconds, fastest, slowest),
        "finish": {
            "at": _later(moment, seconds),
            "earliest": _later(moment, fastest) if spread else None,
            "latest": _later(moment, slowest) if spread else None,
        },
        "held_back_by": [] if tok_s is not None else _held_back(known, speed["median"], tokens),
        "unknown": [] if tok_s is not None else [server["name"] for server in servers if server["tok_s"] is None],
        "even_split": None if tok_s is not None else _even_split(known, tokens),
        "one_more_gpu": None,
    }
    if gpus:
        more = speed["median"] / gpus
        faster = tokens / (speed["median"] + more)
        result["one_more_gpu"] = {
            "tok_s": round(more, 1),
            "saves_hours": round((seconds - faster) / HOUR, 2),
            "at": _later(moment, faster),
        }
    return result


def _of_profiles(servers):
    """What was looked for where nothing is known, and what is known instead: `` with profile r16 is known (r2 is: …)``."""
    wanted = list(dict.fromkeys(server["profile"] for server in servers if server.get("profile")))
    known = list(dict.fromkeys(name for server in servers for name in server.get("known_profiles") or []))
    looked_for = f" with profile {' or '.join(wanted)}" if wanted else ""
    instead = f" ({', '.join(known)} {'are' if len(known) > 1 else 'is'}: -e profile={known[-1]})" if known else ""
    return f"{looked_for} is known{instead}"


def _hours(seconds, fastest, slowest):
    rounded = [None if value is None else round(value / HOUR, 2) for value in (seconds, fastest, slowest)]
    return dict(zip(("median", "least", "most"), rounded))


def _held_back(servers, total, tokens):
    """Servers that are slower a GPU than most, and what they cost the whole job."""
    usual = statistics.median(server["tok_s"]["median"] / server["gpus"] for server in servers)
    found = []
    for server in servers:
        own = server["tok_s"]["median"]
        wanted = usual * server["gpus"]
        if own < HOLDS_BACK * wanted:
            lost = tokens / total - tokens / (total - own + wanted)
            found.append(
                {"name": server["name"], "tok_s": own, "usual_tok_s": round(wanted, 1), "costs_hours": round(lost / HOUR, 2)}
            )
    return found


def _even_split(servers, tokens):
    """With an equal share a server the job waits for the slowest one."""
    last = min(servers, key=lambda server: server["tok_s"]["median"])
    return {"hours": round(tokens / len(servers) / last["tok_s"]["median"] / HOUR, 2), "last": last["name"]}


def _key(record):
    return tuple(record.get(name) for name in ("profile", "model", "release")) + (tuple(record["gpus"]),)


def _best(records, output_tokens):
    """The fastest concurrency of records of one kind, at the workload nearest to the job; None where nothing was measured."""
    workloads = {}
    for record in records:
        for run in record["runs"]:
            if not run["failed"]:
                workload = workloads.setdefault(
                    record["workload"]["id"], {"workload": record["workload"], "series": record["series"], "runs": {}}
                )
                workload["runs"].setdefault(run["concurrency"], []).append(run["output_tok_s"])
    if not workloads:
        return None

    def distance(workload):
        off = abs(math.log(workload["workload"]["output_tokens"] / output_tokens))
        # Of equally near ones the job's own text, then what compare.yml measured, then those with more repeats.
        own = workload["workload"]["source"] != "prompts", workload["series"] == ""
        return (round(off, 6), *own, -max(map(len, workload["runs"].values())))

    nearest = min(workloads.values(), key=distance)
    concurrency = max(nearest["runs"], key=lambda at: statistics.median(nearest["runs"][at]))
    values = nearest["runs"][concurrency]
    return {
        "tok_s": {
            "median": round(statistics.median(values), 3), "min": min(values), "max": max(values), "runs": len(values),
        },
        "concurrency": concurrency,
        "workload": nearest["workload"],
    }  # fmt: skip


def speeds(servers, records, output_tokens):
    """What is known of each server's speed at its best concurrency, for a job of such outputs.

    ``servers``: ``name``, ``node``, ``gpus`` (how many), ``profile`` (that it runs or will run), ``model`` and ``kind`` (names
    of its GPUs, None where unknown). ``records``: measurements, as compare.yml keeps them. A server that was not measured
    itself has the speed of one of its kind. Where nothing is known, ``known_profiles`` are those of which it would be, the one
    that was measured last at the end.
    """
    if not isinstance(servers, list) or not isinstance(records, list):
        raise AnsibleTypeError("sglang_speeds needs a list of servers and a list of records")
    _whole("output_tokens", output_tokens, 1)
    measured = [record for record in records if record.get("kind") == "measured"]
    result = []
    for server in servers:
        like = [record for record in measured if record["model"] == server["model"]]
        found, source = _speed_of(server, [r for r in like if r["profile"] == server["profile"]], output_tokens)
        others = {} if found else {r["profile"]: r["at"] for r in sorted(like, key=lambda r: r["at"])}
        known = [
            name
            for name in sorted(others, key=others.get)
            if _speed_of(server, [r for r in like if r["profile"] == name], output_tokens)[0]
        ]
        result.append(
            {
                "name": server["name"],
                "gpus": max(1, server["gpus"]),
                "profile": server["profile"],
                **(found or {"tok_s": None, "concurrency": None, "workload": None}),
                "source": source,
                "known_profiles": known,
            }
        )
    return result


def _speed_of(server, records, output_tokens):
    """A server's speed (``_best``) and where it is from, of records of one profile and model; two None where there is none."""
    own = [record for record in records if record["server"] == server["name"]]
    kind = server.get("kind")
    same_kind = [r for r in records if kind is not None and list(r["gpus"]) == list(kind)]
    neighbours = [r for r in records if kind is None and r["node"] == server["node"] and _count(r) == server["gpus"]]
    for candidates, why in ((own, None), (same_kind, "its kind"), (neighbours, "the same node")):
        candidates = _newest(candidates)
        found = _best(candidates, output_tokens)
        if found:
            others = ", ".join(dict.fromkeys(record["server"] for record in candidates))
            return found, "measured" if why is None else f"as {others} ({why})"
    return None, None


def _count(record):
    return len(record["gpus"])


def _newest(records):
    """Of measurements those that were started like the newest, and of each server and workload one series of them.

    That is the series with most runs, of equal ones the newest: one that was cut takes the place of none that has more. One of
    compare.yml goes before single benchmarks.
    """
    if not records:
        return []
    last = max(records, key=lambda record: record["at"])
    launches, series = {}, {}
    for record in sorted(records, key=lambda record: record["at"]):
        if _key(record) == _key(last):
            launches[record["server"]] = record["launch_sha256"]
    for record in records:
        if _key(record) == _key(last) and record["launch_sha256"] == launches[record["server"]]:
            of = series.setdefault((record["server"], record["workload"]["id"]), {})
            of.setdefault(record["series"], []).append(record)

    def weight(one):
        name, members = one
        return (name != "", sum(not run["failed"] for record in members for run in record["runs"]), name)

    return [record for of in series.values() for record in max(of.items(), key=weight)[1]]


def told(moment):
    """A time as people say it: ``Thu 2026-12-17 03:21 +01:00``."""
    at = datetime.datetime.fromisoformat(moment)
    zone = at.strftime("%z")
    return f"{at.strftime('%a %Y-%m-%d %H:%M')} {zone[:3]}:{zone[3:]}"


def number(value):
    """A count with its thousands apart, as far as it matters."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def duration(hours):
    """Hours as hours, and from two days on as days too."""
    return f"{hours:.1f} h" + (f" ({hours / 24:.1f} days)" if hours >= 48 else "")


def report(result, servers=None):
    """An ETA (filter sglang_eta) and what it came from (filter sglang_speeds), as text of at most 72 columns."""
    if not isinstance(result, dict):
        raise AnsibleTypeError(f"sglang_eta_report needs the result of sglang_eta, got {type(result).__name__}")
    table = filter_loader.get("sglang_table").j2_function
    show = filter_loader.get("sglang_figure").j2_function
    parts = []
    if servers:
        rows = [
            [
                server["name"],
                server["profile"],
                server["concurrency"],
                show(server["tok_s"]),
                (server["tok_s"] or {}).get("runs"),
            ]
            for server in servers
        ]
        headers = ["server", "profile", "at once", "tok/s, median (least-most)", "runs"]
        parts.append(table(rows, headers))
        notes = {}
        for server in servers:
            if server["tok_s"] is None:
                continue
            said = server["source"]
            if server.get("workload"):
                text = filter_loader.get("sglang_workload_text").j2_function(server["workload"])
                said = f"{said}, {text}"
                sent, job = server["workload"]["output_tokens"], result["output_tokens"]
                if not 1 / UNLIKE < job / sent < UNLIKE:
                    said += f"; unlike the job, which has {job:,} out: compare.yml measures what is more like it"
            notes.setdefault(said, []).append(server["name"])
        told_of = (f"{', '.join(names)}: {said}" for said, names in notes.items())
        parts.append("\n".join(textwrap.fill(one, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for one in told_of))
    speed, hours, finish = result["tok_s"], result["hours"], result["finish"]
    lines = [
        f"fleet:   {number(speed['median'])} tok/s = {number(result['tokens_an_hour'])} tokens an hour,"
        f" {number(result['tokens_a_day'])} a day",
        f"left:    {result['tokens_left']:,} tokens, {duration(hours['median'])}",
        f"done by: {told(finish['at'])}",
    ]
    if finish["earliest"]:
        lines.append(f"between: {told(finish['earliest'])} and {told(finish['latest'])} (range of the runs)")
    elif speed["runs"] == 0:
        lines.append("between: not known, a speed that is given has no spread")
    else:
        lines.append("between: not known, one run has no spread")
    if result["one_more_gpu"]:
        more = result["one_more_gpu"]
        lines.append(f"one more GPU: +{number(more['tok_s'])} tok/s, saves {more['saves_hours']:.1f} h")
    for slow in result["held_back_by"]:
        lines.append(
            f"held back by {slow['name']}: {number(slow['tok_s'])} tok/s where {number(slow['usual_tok_s'])} is usual,"
            f" costs {slow['costs_hours']:.1f} h"
        )
    split = result["even_split"]
    if split and split["hours"] > hours["median"] * 1.02:
        lines.append(f"with equal shares instead of a queue: {duration(split['hours'])}, {split['last']} is last")
    reasons = {server["name"]: server["source"] for server in servers or [] if server["tok_s"] is None}
    for name in result["unknown"]:
        lines.append(f"not counted: {name}: {reasons.get(name) or 'its speed is not known'}")
    return "\n\n".join([*parts, "\n".join(lines)])


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"sglang_eta": eta, "sglang_speeds": speeds, "sglang_eta_report": report}
