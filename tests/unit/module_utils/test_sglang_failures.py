# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every entry of the catalogue against a log that shows it, and what no entry may do."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.sglang_failures import (
    AFTERMATH,
    DEATHS,
    REDUCTIONS,
    SPECIFIC,
    SPECIFIC_IDS,
    STAGES_HERE,
    applies,
    compiled,
    match,
    release_key,
)
from ansible.module_utils.sglang_log import STAGE_NAMES, aftermath, failure, lines_of, read_startup, reductions
from helpers.replay import recorded_log

LOGS = Path(__file__).resolve().parents[2] / "data" / "logs"
LINES = yaml.safe_load((LOGS / "lines.yml").read_text(encoding="utf-8"))
CATALOGUE = {"specific": SPECIFIC, "aftermath": AFTERMATH, "reductions": REDUCTIONS}
KEYS = {"id", "phrase", "stage", "since", "until", "sure", "cause", "advice", "source"}


def log_of(case):
    if "log" in case:
        return lines_of(case["log"])
    path = LOGS / "cpu-0.5.23" / f"{case['file']}.log"
    return read_startup(path) if path.exists() else lines_of(recorded_log(case["file"]))


def name(case):
    return case["id"]


@pytest.mark.parametrize("part", CATALOGUE)
def test_every_entry_has_a_log_that_shows_it(part):
    here, shown = ([entry["id"] for entry in entries] for entries in (CATALOGUE[part], LINES[part]))
    missing, unknown = Counter(here) - Counter(shown), Counter(shown) - Counter(here)
    assert not missing, f"lines.yml has no log for {', '.join(missing)}"
    assert not unknown, f"lines.yml has a log for {', '.join(unknown)}, which the catalogue has not"
    moved = next((there for one, there in zip(here, shown) if one != there), None)
    assert moved is None, f"lines.yml has the log for {moved} at another place than the catalogue has the entry"


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"phrase": "error ("}, "has a phrase that is no regular expression (missing ), unterminated"),
        ({"stage": ("weigths",)}, "has the stage 'weigths': expected a tuple of import, weights, "),
        ({"stage": "weights"}, "has the stage 'weights': expected a tuple of import, weights, "),
        ({"stage": None}, "has the stage None: expected a tuple of import, weights, "),
        ({"phrase": None}, "has no phrase: add it as text"),
    ],
)
def test_a_broken_entry_is_told_by_its_file_and_id(broken, told):
    with pytest.raises(ValueError, match=re.escape(f"module_utils/sglang_failures.py: entry 'mine' {told}")):
        compiled({"id": "mine", "phrase": "x", "cause": "y", **broken})


@pytest.mark.parametrize("case", LINES["specific"], ids=name)
def test_a_log_is_told_by_its_first_specific_cause(case):
    where = {"stage": case.get("stage", "import"), "release": case.get("release")}
    verdict = failure(log_of(case), dead=True, **where)
    assert verdict, f"no entry of SPECIFIC knows a line of this log in stage {where['stage']}"
    assert (verdict["id"], verdict["cause"]) == (case["id"], case["cause"])
    assert verdict["advice"] == case.get("advice", verdict["advice"])
    assert "{" not in verdict["cause"] + verdict["advice"]
    assert verdict["line"] in [line[:1000] for line in log_of(case)]
    # The generic lines of the deaths that follow never win.
    follows = ["Scheduler hit an exception: Traceback", "Received sigquit from a child process."]
    assert failure([*log_of(case), *follows], **where)["id"] == case["id"]
    assert failure([*follows, *log_of(case)], **where)["id"] == case["id"]


@pytest.mark.parametrize("case", [case for case in LINES["specific"] if case.get("dead") is False], ids=name)
def test_what_a_healthy_server_may_log_ends_nothing_by_itself(case):
    assert failure(log_of(case), case.get("release"), case.get("stage", "import")) is None


@pytest.mark.parametrize("case", LINES["aftermath"], ids=name)
def test_a_death_without_a_cause_is_told_by_its_aftermath(case):
    lines = log_of(case)
    assert failure(lines) is None
    verdict = aftermath(lines, case.get("stage", "import"))
    assert verdict, "no entry of AFTERMATH knows a line of this log"
    assert (verdict["id"], verdict["cause"]) == (case["id"], case["cause"])
    assert verdict["advice"] == case.get("advice", verdict["advice"])
    assert "{" not in verdict["cause"] + verdict["advice"]


@pytest.mark.parametrize("case", LINES["reductions"], ids=name)
def test_a_reduction_is_no_failure(case):
    assert reductions(log_of(case)) == [case["cause"]]
    assert failure(log_of(case)) is None


@pytest.mark.parametrize("entry", [*SPECIFIC, *AFTERMATH, *REDUCTIONS], ids=name)
def test_an_entry_is_whole(entry):
    assert {"id", "phrase", "cause", "source"} <= set(entry) <= KEYS
    assert ("advice" in entry) == (entry not in REDUCTIONS)
    advice = entry.get("advice", [])
    for text in (entry["cause"], *([advice] if isinstance(advice, str) else advice)):
        assert text and not text.endswith(".")
    groups = set(re.compile(entry["phrase"]).groupindex)
    assert set(re.findall(r"{(\w+)}", entry["cause"])) <= groups, "a cause holds only what its own line says"
    for release in (entry.get("since"), entry.get("until")):
        assert release is None or len(release_key(release)) >= 3


def test_stages_are_those_of_the_log_and_the_three_that_only_failures_know():
    assert [stage for stage in STAGES_HERE if stage in STAGE_NAMES] == STAGE_NAMES
    assert set(DEATHS) <= {entry["id"] for entry in AFTERMATH}


OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total"


@pytest.mark.parametrize(
    ("before", "cause_id"),
    [
        ([], "weights_memory"),
        (["Load weight begin. avail mem=90.00 GB"], "weights_memory"),
        (["Load weight begin. avail mem=90.00 GB", "Load weight end. elapsed=1 s"], "pool_memory"),
        (["Mamba Cache is allocated. max_mamba_cache_size: 24"], "pool_memory"),
        (["KV Cache is allocated. dtype: torch.bfloat16"], "pool_memory"),
        (["Capture target decode CUDA graph begin."], "graph_capture_memory"),
        (["Capture target verify CUDA graph begin.", "Capture target verify CUDA graph end."], "draft_graph_memory"),
        (["Allocating 40.00 GB host memory for hierarchical KV cache."], "hicache_gpu_memory"),
        (["INFO: Uvicorn running on http://127.0.0.1:30000"], "request_memory"),
        (["INFO: Uvicorn running on http://127.0.0.1:30000", "The server is fired up and ready to roll!"], "request_memory"),
    ],
)
def test_the_same_words_mean_another_thing_in_another_stage(before, cause_id):
    assert failure([*before, OUT], dead=True)["id"] == cause_id


def test_a_release_that_does_not_print_a_phrase_is_not_told_by_it():
    entry = {"since": "0.5.12", "until": "0.5.14"}
    told = {
        release: applies(entry, release) for release in ("0.5.9", "0.5.11", "0.5.12.post1", "0.5.14.post1", "0.5.15", None, "")
    }
    assert told == {
        "0.5.9": False, "0.5.11": False, "0.5.12.post1": True, "0.5.14.post1": True, "0.5.15": False, None: True, "": True,
    }  # fmt: skip
    line = "RuntimeError: Destination indices must be a CUDA tensor"
    assert match(line, SPECIFIC, release="0.5.17")["id"] == "hybrid_hicache"
    assert match(line, SPECIFIC, release="0.5.23") is None


def test_an_advice_without_its_numbers_is_still_one():
    line = "Not enough GPU memory for hybrid (mamba) state cache. (total_rest_memory=-2.97 GB"
    assert match(line, SPECIFIC)["advice"].startswith("raise mem-fraction-static: ")
    told = {"fraction": 0.95, "free_gpu_gib": 20.0}
    assert match(line, SPECIFIC, told=told)["advice"].startswith("raise mem-fraction-static: "), "0.97 and more is no advice"


def test_the_example_of_the_docs_is_an_entry_that_is_not_there_and_its_log():
    docs = (LOGS.parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    entry = ast.literal_eval(re.search(r"```python\n(.*?)```", docs, re.DOTALL).group(1))
    (case,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", docs, re.DOTALL).group(1))
    assert {"id", "phrase", "cause", "advice", "source"} <= set(entry) <= KEYS
    assert case["id"] == entry["id"] and entry["id"] not in SPECIFIC_IDS and match(case["log"], SPECIFIC) is None
    found = compiled(entry).search(case["log"])
    assert entry["cause"].format(**found.groupdict()) == case["cause"]


def test_a_healthy_line_has_no_cause():
    line = "[2026-01-01 00:00:00] Decode batch, #running-req: 1, token usage: 0.00"
    assert match(line, [*SPECIFIC, *AFTERMATH, *REDUCTIONS]) is None
