# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report's page by its structure: whole, of one file, and nothing in it that data put there as markup."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest
from ansible.errors import AnsibleFilterError, AnsibleTypeError
from helpers.compare import WORKLOAD, curve, record, refused, run
from sglang_compare import comparisons
from sglang_page import page

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = '<script>alert("x")</script>&<img src=http://evil.example/>$\\frac{1}{0}$'


class Page(HTMLParser):
    """The page as a list of elements, each with its path, attributes and text; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.styles = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append({"tag": tag, "path": [entry["tag"] for entry in self.open], "attrs": dict(attrs), "text": ""})
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "path": [entry["tag"] for entry in self.open], "attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        for entry in self.open:
            entry["text"] += data

    def all(self, tag, inside=None):
        return [entry for entry in self.elements if entry["tag"] == tag and (inside is None or inside in entry["path"])]

    def texts(self, tag):
        return [" ".join(entry["text"].split()) for entry in self.all(tag)]


@pytest.fixture(scope="module")
def records():
    found = [
        *curve("nomtp", {1: 69, 8: 480, 16: 923}),
        *curve("mtp", {1: 160, 8: 600, 16: 700}, accept=3.2),
        record("mtp", [run(1, 150), run(16, 1, failed=3)], repeat=4, outcome="failed", error=f"3 of 64 failed: {HOSTILE}"),
        refused("mtp_hicache", "not enough host memory"),
    ]
    return found + curve("nomtp", {1: 66, 16: 820}, workload={**WORKLOAD, "id": "l", "name": "long"})


@pytest.fixture(scope="module")
def made(records):
    return page(comparisons(records), "2026-11-29 18:00 +0100")


@pytest.fixture(scope="module")
def parsed(made):
    return Page(made)


def test_it_is_one_whole_page_that_needs_no_network(made, parsed):
    assert made.startswith("<!DOCTYPE html>") and made.endswith("</html>")
    assert [len(parsed.all(tag)) for tag in ("html", "head", "body", "title", "h1")] == [1] * 5
    assert parsed.all("html")[0]["attrs"]["lang"] == "en"
    assert not any(parsed.all(tag) for tag in ("script", "link", "img", "iframe", "object", "image"))
    for entry in parsed.elements:
        for name, value in entry["attrs"].items():
            if name in ("src", "href", "xlink:href", "data"):
                assert value.startswith("#"), (entry["tag"], value)
            assert not name.startswith("on")
    assert not re.search(r"url\((?!#)", made) and "@import" not in made


def test_it_is_for_a_telephone_for_dark_rooms_and_for_paper(made, parsed):
    (viewport,) = [meta for meta in parsed.all("meta") if meta["attrs"].get("name") == "viewport"]
    assert viewport["attrs"]["content"] == "width=device-width, initial-scale=1"
    style = parsed.all("style")[0]["text"]
    assert "prefers-color-scheme: dark" in style and "@media print" in style
    # Every colour of a drawing is the page's own, so that it follows; and the page has it for both themes.
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", made))
    for block in (
        style.split("@media (prefers-color-scheme: dark)")[0],
        style.split("dark)")[1],
        style.split("@media print")[1],
    ):
        assert used <= set(re.findall(r"(--[a-z0-9]+):", block)), block
    for svg in re.findall(r"<svg.*?</svg>", made, re.DOTALL):
        assert set(re.findall(r"#[0-9a-fA-F]{6}\b", svg)) == set()


def test_each_comparison_has_its_plots_and_tables(parsed):
    assert parsed.texts("h2") == ["long: 128 in, 256 out, random tokens", "short: 128 in, 256 out, random tokens"]
    assert parsed.texts("figcaption") == [
        "Throughput over concurrency",
        "Time to first token against throughput",
        "Time per output token against throughput",
        "Memory, planned and observed",
        "Time to start, by stage",
        "Throughput over concurrency",
        "Time to first token against throughput",
        "Time per output token against throughput",
        "Acceptance length",
        "Memory, planned and observed",
        "Time to start, by stage",
    ]
    assert len(parsed.all("svg")) == len(parsed.all("figcaption"))
    assert all("viewbox" in svg["attrs"] and "width" not in svg["attrs"] for svg in parsed.all("svg"))
    assert [len(parsed.all("table")), len(parsed.all("thead")), len(parsed.all("tbody"))] == [8, 8, 8]
    identities = [entry["attrs"]["id"] for entry in parsed.elements if "id" in entry["attrs"]]
    assert len(identities) == len(set(identities))


def test_a_figure_has_median_spread_and_runs(parsed):
    cells = [" ".join(cell["text"].split()) for cell in parsed.all("td")]
    at = cells.index("923.0 (904.5-941.5)")
    assert cells[at - 2 : at + 4] == ["nomtp", "16", "923.0 (904.5-941.5)", "1384.5 (1356.8-1412.2)", "–", "3"]
    assert "3, 1 failed" in cells


def test_the_verdict_the_marks_and_what_failed_are_told(parsed):
    said = parsed.texts("p")
    assert any(text.startswith("mtp* wins up to 10 concurrent, nomtp above") for text in said)
    assert any(text.startswith("* mtp: acceptance on random tokens") for text in said)
    assert any(text.startswith("mtp_hicache did not start on node1-gpu0 (repeat 1): not enough host memory") for text in said)
    assert "mtp*" in [" ".join(cell["text"].split()) for cell in parsed.all("td")]
    ran = "\n".join(entry["text"] for entry in parsed.all("pre"))
    assert "--speculative-algorithm EAGLE" in ran and "CUDA_VISIBLE_DEVICES=0" in ran
    facts = parsed.texts("dd")
    assert "NVIDIA H200, driver 580.95.05" in facts and "SGLang 0.5.17" in facts


def test_what_comes_from_data_is_text_and_nothing_else(records):
    hostile = [
        {
            **one,
            "model": HOSTILE,
            "model_path": HOSTILE,
            "server": HOSTILE,
            "gpus": [HOSTILE],
            "driver": HOSTILE,
            "flags": [["--x", HOSTILE]],
            "env": {"E": HOSTILE},
            "profile": one["profile"] + HOSTILE,
            "launch_sha256": one["profile"],
        }
        for one in records
        if one["kind"] == "measured"
    ]
    for one in hostile:
        one["boot"] = {**one["boot"], "stages": {**one["boot"]["stages"], HOSTILE: 1.0}}
    text = page(comparisons(hostile), HOSTILE)
    parsed = Page(text)
    assert not parsed.all("script") and not parsed.all("img")
    assert HOSTILE in parsed.all("dd")[0]["text"]
    assert "mathdefault" not in text and "<script" not in text


def test_a_page_is_the_same_when_it_is_made_again(records, made):
    assert page(comparisons(records), "2026-11-29 18:00 +0100") == made


def test_one_point_and_many_profiles_and_ticks_that_would_touch():
    many = [one for n in range(10) for one in curve(f"p{n}", {47: 10.0 + n, 48: 11.0 + n}, repeats=1)]
    parsed = Page(page(comparisons(many), "now"))
    assert len(parsed.all("svg")) == 5
    ticks = [entry["text"].strip() for entry in parsed.all("text")]
    assert "47" in ticks
    single = Page(page(comparisons(curve("a", {4: 10.0}, repeats=1)), "now"))
    assert len(single.all("svg")) == 5


def test_nothing_to_report_is_refused():
    with pytest.raises(AnsibleFilterError, match="nothing to report yet: compare.yml"):
        page([], "now")
    with pytest.raises(AnsibleTypeError, match="needs a list"):
        page(None, "now")


def test_without_matplotlib_one_sentence_says_how_to_get_it(records, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AnsibleFilterError, match="pip install -r requirements-report.txt"):
        page(comparisons(records), "now")
