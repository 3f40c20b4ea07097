# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Alerts by promtool, and the names of metrics by what real servers on a GPU said."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

METRIC = re.compile(r"sglang:[a-z0-9_]+")
# SGLang has a histogram only once something was counted in it, and these servers had streamed nothing.
ONLY_STREAMED = {"sglang:inter_token_latency_seconds_bucket"}


@pytest.fixture(scope="module")
def files(root):
    return root / "roles" / "sglang_prometheus" / "files"


@pytest.fixture(scope="module")
def promtool():
    path = shutil.which("promtool")
    assert path, "promtool is not there: apt-get install prometheus"

    def _promtool(*words, cwd):
        return subprocess.run([path, *words], cwd=cwd, capture_output=True, text=True, check=False)

    return _promtool


def test_rules_and_configuration_are_good(files, promtool, tmp_path):
    for path in files.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "targets").mkdir()
    target = [{"targets": ["127.0.0.1:30000"], "labels": {"node": "n", "server": "n-gpu0", "profile": "mtp"}}]
    (tmp_path / "targets/n-gpu0.json").write_text(json.dumps(target))
    checked = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rules = promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml", cwd=tmp_path)
    assert rules.returncode == 0, rules.stdout + rules.stderr


def test_alerts_ring_when_they_should_and_not_otherwise(root, files, promtool, tmp_path):
    text = (root / "tests/data/prometheus/alerts_test.yml").read_text(encoding="utf-8")
    (tmp_path / "alerts_test.yml").write_text(text.replace("{rules}", str(files / "alerts.yml")), encoding="utf-8")
    ran = promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    alerts = {
        rule["alert"]
        for group in yaml.safe_load((files / "alerts.yml").read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    }
    rung = {
        case["alertname"] for test in yaml.safe_load(text)["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]
    }
    assert rung == alerts


@pytest.mark.parametrize("recording", ["e96_nomtp", "e96_mtp_hicache", "q27_mtp"])
def test_metrics_are_called_what_real_servers_call_them(root, files, recording):
    text = (root / "tests/replay/recordings" / recording / "metrics.txt").read_text(encoding="utf-8")
    there = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line.startswith("sglang:")}
    used = set()
    for name in ("alerts.yml", "dashboard.json"):
        used |= set(METRIC.findall((files / name).read_text(encoding="utf-8")))
    assert used - there <= ONLY_STREAMED
    assert len(used & there) >= 8


def test_every_query_of_the_dashboard_is_for_the_servers_chosen(files, promtool, tmp_path):
    dashboard = json.loads((files / "dashboard.json").read_text(encoding="utf-8"))
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "node", "server", "profile"]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 10
    rules = []
    for number, expression in enumerate(expressions):
        for label in ("node", "server", "profile"):
            assert f'{label}=~"${label}"' in expression
        # promtool knows no variables of Grafana: any value will do to see that the rest is a good expression.
        plain = expression.replace("$__rate_interval", "1m")
        rules.append({"record": f"panel:{number}:it", "expr": re.sub(r'"\$\w+"', '".*"', plain)})
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "panels.yml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells))
