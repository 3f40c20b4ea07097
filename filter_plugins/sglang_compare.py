# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profiles side by side: what repeated measurements say, where one overtakes another, and what can't be compared.

Pure functions over the records that ``compare.yml`` keeps. A figure is always a mapping ``median``, ``min``, ``max`` and
``runs``: the spread is the range, because a handful of repeats has no percentiles.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap

from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader

SCHEMA = 1
WIDTH = 72
FIGURES = ("output_tok_s", "total_tok_s", "ttft_ms", "tpot_ms", "ttft_p99_ms", "tpot_p99_ms", "accept_length")
# What a log tells of memory without a plan beside it: name in a plan, name in the log.
OBSERVED = {"weights_gib": "weights_gib", "kv_tokens": "kv_tokens", "mamba_slots": "state_slots"}
RANDOM_WEIGHTS = "weights are random (load-format dummy), so the acceptance length is not a trained model's"
RANDOM_TOKENS = "acceptance on random tokens says nothing of a job's text: measure with -e prompts=FILE"


def stat(values):
    """Median and range of what is known of ``values``; None where nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, middle, high = min(known), statistics.median(known), max(known)
    return {"median": round(middle, 3), "min": round(low, 3), "max": round(high, 3), "runs": len(known)}


def _records(records, what):
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise AnsibleTypeError(f"{what} needs a list of records, got {type(records).__name__}")
    for record in records:
        if record.get("schema") != SCHEMA:
            raise AnsibleFilterError(
                f"a record of {record.get('server')} has schema {record.get('schema')!r}: expected {SCHEMA};"
                " it was written by another version of this project"
            )
    return records


def workload_text(workload):
    """A workload in a few words: ``short: 128 in, 256 out, random tokens``."""
    if workload["source"] == "random":
        sent = f"{workload['input_tokens']} in, {workload['output_tokens']} out, random tokens"
    else:
        sent = f"{workload['prompts']} prompts of a file, {workload['output_tokens']} out"
    return f"{workload['name']}: {sent}"


def _what(record):
    """What must be equal for two results to be comparable, as a person reads it."""
    workload = record.get("workload")
    return {
        "workload": f"{workload_text(workload)} ({workload['id']})" if workload else None,
        "model": record["model"],
        "model files": record["model_path"],
        "release": f"SGLang {record['release']}",
        "GPU": ", ".join(record["gpus"]) or record["device"],
    }


def _flag(flags, name):
    """A flag's value in a list of flags, True for a bare one, None without it."""
    for first, *rest in flags:
        key, equals, value = first.lstrip("-").partition("=")
        if key == name:
            return value if equals else " ".join(rest) or True
    return None


def caveats(record):
    """Why a speculative profile's figures are not those of a job: sentences, none without speculation."""
    if not _flag(record["flags"], "speculative-algorithm"):
        return []
    found = []
    simulated = (record.get("env") or {}).get("SGLANG_SIMULATE_ACC_LEN")
    if simulated:
        found.append(f"acceptance is simulated (SGLANG_SIMULATE_ACC_LEN={simulated}), not measured")
    if _flag(record["flags"], "load-format") == "dummy":
        found.append(RANDOM_WEIGHTS)
    if record.get("workload") and record["workload"]["source"] == "random":
        found.append(RANDOM_TOKENS)
    return found


def _refuse_unlike(records):
    for what in _what(records[0]):
        found = list(dict.fromkeys(_what(record)[what] for record in records if _what(record)[what]))
        if len(found) > 1:
            raise AnsibleFilterError(f"these results can't be compared: they differ in {what}: {'; '.join(found)}")
    changes = filter_loader.get("sglang_flag_changes").j2_function
    first = {}
    for record in records:
        if record["launch_sha256"] is None:
            continue  # refused before it was known what it would be started with
        same = first.setdefault((record["profile"], record["server"]), record)
        if record["launch_sha256"] != same["launch_sha256"]:
            differs = changes(same["flags"], record["flags"]) or ["environment or keys"]
            raise AnsibleFilterError(
                f"these results can't be compared: profile {record['profile']} ran on {record['server']} with unlike flags:"
                f" {'; '.join(differs)}"
            )


def _refuse_no_numbers(runs):
    for run in runs:
        figures = {name: run[name] for name in ("output_tok_s", "total_tok_s", "accept_length")}
        figures |= {f"{name}.{part}": run[name][part] for name in ("ttft_ms", "tpot_ms") for part in ("median", "p99")}
        for name, value in figures.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise AnsibleTypeError(f"{name} of a run at concurrency {run['concurrency']} is {value!r}: expected a number")


def _cells(records):
    """One entry a concurrency. A run with failed requests is counted apart and never averaged in."""
    runs = {}
    for record in records:
        for run in record["runs"]:
            runs.setdefault(run["concurrency"], []).append(run)
    cells = []
    for concurrency, all_runs in sorted(runs.items()):
        good = [run for run in all_runs if not run["failed"]]
        _refuse_no_numbers(good)
        values = {
            "output_tok_s": [run["output_tok_s"] for run in good],
            "total_tok_s": [run["total_tok_s"] for run in good],
            "ttft_ms": [run["ttft_ms"]["median"] for run in good],
            "tpot_ms": [run["tpot_ms"]["median"] for run in good],
            "ttft_p99_ms": [run["ttft_ms"]["p99"] for run in good],
            "tpot_p99_ms": [run["tpot_ms"]["p99"] for run in good],
            "accept_length": [run["accept_length"] for run in good],
        }
        cells.append(
            {
                "concurrency": concurrency,
                "runs": len(good),
                "failed": len(all_runs) - len(good),
                **{name: stat(values[name]) for name in FIGURES},
            }
        )
    return cells


def _memory(boots):
    """Planned and observed, by figure, over the boots of a profile; observed alone where there was no plan."""
    rows = {}
    for boot in boots:
        seen = boot.get("observed") or {}
        alone = [
            {"figure": figure, "planned": None, "observed": seen[name]} for figure, name in OBSERVED.items() if seen.get(name)
        ]
        for row in boot.get("memory") or alone:
            rows.setdefault(row["figure"], []).append(row)
    return [
        {
            "figure": figure,
            "planned": stat([row["planned"] for row in found]),
            "observed": stat([row["observed"] for row in found]),
        }
        for figure, found in rows.items()
    ]


def _refused(records):
    """Starts of a profile that failed, oldest first. Those alike but for numbers (ports, sizes) are one, as last told."""
    found = {}
    for record in sorted(records, key=lambda record: record["at"]):
        alike = found.setdefault((record["server"], re.sub(r"\d+", "0", str(record["error"]))), {"times": 0})
        alike.update(server=record["server"], repeat=record["repeat"], error=record["error"], times=alike["times"] + 1)
    return list(found.values())


def _profile(name, records):
    measured = [record for record in records if record["kind"] == "measured"]
    refused = [record for record in records if record["kind"] == "refused"]
    boots = list({(record["server"], record["boot"]["launched_at"]): record["boot"] for record in measured}.values())
    # A boot that was only found running has the stages of the boot, long ago: they count once, like any other.
    stages = list(dict.fromkeys(stage for boot in boots for stage in boot["stages"] or {}))
    return {
        "name": name,
        "flags": records[-1]["flags"],
        "env": records[-1]["env"],
        "launch_sha256": sorted({record["launch_sha256"] for record in records if record["launch_sha256"]}),
        "caveats": list(dict.fromkeys(caveat for record in records for caveat in caveats(record))),
        "cells": _cells(measured),
        "boots": len(boots),
        "ready_s": stat([boot["ready_s"] for boot in boots]),
        "stages": {stage: stat([(boot["stages"] or {}).get(stage) for boot in boots]) for stage in stages},
        "cap": stat([boot["cap"] for boot in boots]),
        "memory": _memory(boots),
        "refused": _refused(refused),
        "errors": [
            {"server": record["server"], "repeat": record["repeat"], "error": record["error"]}
            for record in measured
            if record["outcome"] != "measured"
        ],
    }


def compare(records):
    """Results of profiles that can be compared, side by side.

    ``records``: of one workload, model, release and kind of GPU; anything else is refused by what differs.
    """
    records = _records(records, "sglang_compare")
    if not any(record["kind"] == "measured" for record in records):
        raise AnsibleFilterError("there is nothing to compare: none of these records is of a measurement")
    _refuse_unlike(records)
    names = list(dict.fromkeys(record["profile"] for record in records))
    profiles = [_profile(name, [record for record in records if record["profile"] == name]) for name in names]
    measured = [record for record in records if record["kind"] == "measured"]
    servers = list(dict.fromkeys(record["server"] for record in records))
    notes = []
    for profile in profiles:
        on = {record["server"] for record in measured if record["profile"] == profile["name"]}
        if on and on != set(servers):
            notes.append(f"{profile['name']} was measured on {', '.join(sorted(on))} only")
        counts = {cell["runs"] for cell in profile["cells"]}
        if len(counts) > 1:
            notes.append(f"{profile['name']} has {min(counts)} to {max(counts)} runs at a concurrency")
    drivers = {}
    for record in sorted(measured, key=lambda record: record["at"]):
        drivers.setdefault(record["driver"], {})[record["profile"]] = None
    if len(drivers) > 1:
        under = "; ".join(f"{driver or 'unknown'} ({', '.join(ran)})" for driver, ran in drivers.items())
        notes.append(f"the driver differs between the runs: {under}")
    first = measured[0]
    curves = {name: curve for name, curve in ((profile["name"], _curve(profile)) for profile in profiles) if curve}
    crossed = crossover(curves)
    # In the sentence a profile's name has its mark; as data it is the name.
    marks = {marked(profile): curves[profile["name"]] for profile in profiles if profile["name"] in curves}
    crossed["text"] = crossover(marks)["text"]
    return {
        "schema": SCHEMA,
        "workload": first["workload"],
        "model": first["model"],
        "model_path": first["model_path"],
        "release": first["release"],
        "device": first["device"],
        "gpus": first["gpus"],
        "drivers": sorted({record["driver"] for record in records if record["driver"]}),
        "servers": servers,
        "measured": {
            "first": min(record["measured_at"] for record in measured),
            "last": max(record["measured_at"] for record in measured),
        },
        "profiles": profiles,
        "crossover": crossed,
        "notes": notes,
    }


def _curve(profile):
    return [{"concurrency": cell["concurrency"], "tok_s": cell["output_tok_s"]} for cell in profile["cells"] if cell["runs"]]


def comparisons(records, profiles=None):
    """All comparisons that ``records`` hold: one for each workload, model, release and kind of GPU, newest series only.

    A profile whose flags were changed within a series counts as of its newest flags. ``profiles``: names of those that are
    wanted, all of them without.
    """
    if isinstance(profiles, str):
        raise AnsibleTypeError(f"sglang_comparisons: profiles is {profiles!r}: expected a list of names")
    records = [
        record
        for record in _records(records, "sglang_comparisons")
        if record["kind"] in ("measured", "refused") and (not profiles or record["profile"] in profiles)
    ]
    sets = {}
    for record in sorted(records, key=lambda record: record["at"]):
        if record["kind"] == "measured":
            sets.setdefault(tuple(_what(record).values()), []).append(record)
    found = []
    for members in sets.values():
        where = {(record["server"], record["series"]) for record in members}
        refused = [
            record
            for record in records
            if record["kind"] == "refused"
            and (record["server"], record["series"]) in where
            and list(_what(record).values())[1:] == list(_what(members[0]).values())[1:]
        ]
        newest, launches = {}, {}
        for record in members + refused:
            newest[record["server"]] = max(newest.get(record["server"], ""), record["series"])
        kept = [record for record in members + refused if record["series"] == newest[record["server"]]]
        for record in sorted(kept, key=lambda record: record["at"]):
            if record["launch_sha256"]:
                launches[record["server"], record["profile"]] = record["launch_sha256"]
        like = [
            record for record in kept if record["launch_sha256"] in (None, launches.get((record["server"], record["profile"])))
        ]
        if any(record["kind"] == "measured" for record in like):
            found.append(compare(like))
    return sorted(found, key=lambda one: (one["model"], one["gpus"], one["release"], one["workload"]["name"]))


def _curves(curves):
    if not isinstance(curves, dict):
        raise AnsibleTypeError(f"sglang_crossover needs a mapping of profiles, got {type(curves).__name__}")
    by_profile = {}
    for name, points in curves.items():
        by_profile[name] = {}
        for point in points:
            figure = point["tok_s"]
            if isinstance(figure, bool) or not isinstance(figure, dict) or not figure.get("median", 0) > 0:
                raise AnsibleFilterError(f"{name}: tok_s is {figure!r}: expected a mapping with a median above 0")
            by_profile[name][point["concurrency"]] = figure
    return by_profile


def _winner(figures, before):
    """``figures``: by profile, at one concurrency. The one with the highest median; the one before it keeps a draw."""
    best = max(figure["median"] for figure in figures.values())
    drawn = sorted(name for name, figure in figures.items() if figure["median"] == best)
    winner = before if before in drawn else drawn[0]
    others = {name: figure for name, figure in figures.items() if name != winner}
    second = max(sorted(others), key=lambda name: others[name]["median"])
    mine = figures[winner]
    # One run has no range, but it can lie in that of another.
    overlaps = [figure["max"] >= mine["min"] for figure in others.values() if max(figure["runs"], mine["runs"]) > 1]
    repeated = min(mine["runs"], figures[second]["runs"]) > 1
    clear = False if any(overlaps) else True if repeated else None
    ahead = figures[winner]["median"] / others[second]["median"] - 1
    return {"profile": winner, "second": second, "ahead": round(ahead, 4), "clear": clear}


def crossover(curves):
    """Which profile gives most tokens a second at which concurrency, and where one overtakes another.

    ``curves``: by profile a list of ``{"concurrency": int, "tok_s": {"median", "min", "max", "runs"}}``. Only concurrencies
    at which two profiles or more were measured count. Between two of them the lines are taken as straight.
    """
    curves = _curves(curves)
    shared = sorted({point for points in curves.values() for point in points})
    shared = [point for point in shared if sum(point in points for points in curves.values()) > 1]
    if not shared:
        only = sorted(name for name, points in curves.items() if points)
        text = "nothing to compare: " + (
            f"{', '.join(only)} have no concurrency in common" if len(only) > 1
            else f"only {only[0]} was measured" if only
            else "no profile was measured without a failed request"
        )  # fmt: skip
        return {"winners": [], "segments": [], "crossings": [], "text": text}
    winners = []
    for point in shared:
        figures = {name: points[point] for name, points in curves.items() if point in points}
        before = winners[-1]["profile"] if winners else None
        winners.append({"concurrency": point, **_winner(figures, before)})
    segments, crossings = [], []
    for winner in winners:
        if segments and segments[-1]["profile"] == winner["profile"]:
            segments[-1]["to"] = winner["concurrency"]
            continue
        if segments:
            crossings.append(_crossing(curves, segments[-1], winner))
        segments.append({"profile": winner["profile"], "from": winner["concurrency"], "to": winner["concurrency"]})
    return {
        "winners": winners,
        "segments": segments,
        "crossings": crossings,
        "text": _told(winners, segments, crossings),
    }


def _crossing(curves, segment, winner):
    """Where the straight lines of two profiles meet, between the last win of one and the first of the other."""
    low, high = segment["to"], winner["concurrency"]
    below, above = curves[segment["profile"]], curves[winner["profile"]]
    at = None
    if all(point in line for point in (low, high) for line in (below, above)):
        lead, lag = below[low]["median"] - above[low]["median"], above[high]["median"] - below[high]["median"]
        share = lead / (lead + lag) if lead + lag > 0 else 0.0
        at = min(math.floor(low + (high - low) * share), high - 1)
    return {"below": segment["profile"], "above": winner["profile"], "at": at, "between": [low, high]}


def _told(winners, segments, crossings):
    reach = f"{winners[0]['concurrency']} to {winners[-1]['concurrency']}" if len(winners) > 1 else winners[0]["concurrency"]
    if len(segments) == 1:
        text = f"{segments[0]['profile']} wins at every concurrency measured ({reach})"
    else:
        parts = []
        for segment, crossing in zip(segments, crossings):
            upto = crossing["at"] if crossing["at"] is not None else segment["to"]
            verb = f"{segment['profile']} wins" if not parts else segment["profile"]
            parts.append(f"{verb} up to {upto}{' concurrent' if not parts else ''}")
        between = " and ".join(f"{low} to {high}" for low, high in (crossing["between"] for crossing in crossings))
        text = f"{', '.join(parts)}, {segments[-1]['profile']} above"
        text += f" (measured up to {winners[-1]['concurrency']}, interpolated from {between})"
    close = [str(winner["concurrency"]) for winner in winners if winner["clear"] is False]
    if close:
        text += f"; within the spread of the repeats at {', '.join(close)}"
    single = [str(winner["concurrency"]) for winner in winners if winner["clear"] is None]
    if single:
        where = "" if len(single) == len(winners) else f" at {', '.join(single)}"
        text += f"; single runs{where}, so the spread is not known"
    return text


def shown(figure, digits=1):
    """A figure as text: ``1738.2 (1690.1-1790.0)``; one run has no spread, and neither have runs that read alike."""
    if figure is None:
        return None
    middle, low, high = (f"{figure[key]:.{digits}f}" for key in ("median", "min", "max"))
    return middle if figure["runs"] < 2 or low == high else f"{middle} ({low}-{high})"


def marked(profile):
    """A profile's name, with a mark where its figures need a word beside them."""
    return profile["name"] + ("*" if profile["caveats"] else "")


def when(refused):
    """At which repeat a profile did not start, or how often."""
    return f"{refused['times']} times" if refused["times"] > 1 else f"repeat {refused['repeat']}"


def title(comparison):
    """The heading of a comparison, in one line."""
    on = ", ".join(comparison["gpus"]) or comparison["device"]
    return f"{comparison['model']}, SGLang {comparison['release']}, {on}; {workload_text(comparison['workload'])}"


def _wrapped(text):
    """Lines of the house's width. A word that is longer, such as a path, stays whole."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def report(found):
    """Comparisons (filter sglang_comparisons) as tables and lines of at most 72 columns."""
    if not isinstance(found, list):
        raise AnsibleTypeError(f"sglang_compare_report needs a list of comparisons, got {type(found).__name__}")
    table = filter_loader.get("sglang_table").j2_function
    parts = []
    for one in found:
        speed, delay, start = [], [], []
        for profile in one["profiles"]:
            for cell in profile["cells"]:
                at = [marked(profile), cell["concurrency"]]
                runs = f"{cell['runs']}, {cell['failed']} failed" if cell["failed"] else cell["runs"]
                speed.append([*at, shown(cell["output_tok_s"]), shown(cell["accept_length"], 2), runs])
                delay.append([*at, shown(cell["ttft_ms"]), shown(cell["tpot_ms"], 2), runs])
            if profile["ready_s"]:
                start.append([marked(profile), shown(profile["ready_s"]), shown(profile["cap"], 0), profile["boots"]])
        parts.append("\n".join(map(_wrapped, (title(one), one["crossover"]["text"]))))
        parts.append("Median (least-most) of the runs\n" + table(speed, ["profile", "at once", "tok/s", "accepted", "runs"]))
        parts.append("Milliseconds, median (least-most)\n" + table(delay, ["profile", "at once", "TTFT", "TPOT", "runs"]))
        if start:
            parts.append(table(start, ["profile", "seconds to ready", "max running", "boots"]))
        lines = []
        for profile in one["profiles"]:
            lines += [f"* {profile['name']}: {caveat}" for caveat in profile["caveats"]]
            lines += [
                f"{profile['name']} on {row['server']} did not start ({when(row)}): {row['error']}"
                for row in profile["refused"]
            ]
            lines += [
                f"{profile['name']} on {row['server']} had errors (repeat {row['repeat']}), not averaged in: {row['error']}"
                for row in profile["errors"]
            ]
        lines += [f"note: {note}" for note in one["notes"]]
        if lines:
            parts.append("\n".join(map(_wrapped, lines)))
    return "\n\n".join(parts) or "Nothing was measured yet: compare.yml measures profiles."


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "sglang_compare": compare,
            "sglang_comparisons": comparisons,
            "sglang_crossover": crossover,
            "sglang_compare_report": report,
            "sglang_figure": shown,
            "sglang_workload_text": workload_text,
        }
