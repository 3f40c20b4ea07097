# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Comparisons as one HTML page that needs no network: plots by matplotlib as SVG, whose colours are the page's own.

matplotlib draws with stand-in colours, each of which becomes a CSS variable of the page, so that one drawing follows light
and dark, and print. It is imported only when a page is made.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import jinja2
from ansible.errors import AnsibleFilterError, AnsibleTypeError
from ansible.plugins.loader import filter_loader
from markupsafe import Markup

TEMPLATE = Path(__file__).resolve().parents[1] / "roles" / "sglang_compare" / "templates"
INSTALL = "the report needs the Python package matplotlib on this machine: pip install -r requirements-report.txt"
# Stand-ins for colours, and the variables of the page that they become.
INK, QUIET, PAPER = "#010203", "#010204", "#010205"
SERIES = tuple(f"#0102{number:02x}" for number in range(16, 24))
COLOURS = {INK: "--ink", QUIET: "--quiet", PAPER: "--paper", **{hue: f"--s{n}" for n, hue in enumerate(SERIES)}}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MARKS = dict(zip(MARKERS, "●■▲◆▼✚✖★"))
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
WIDTH_IN, HEIGHT_IN = 5.2, 3.3  # 374 points wide: letters keep their size on a telephone
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sglang-fleet",
    "text.parse_math": False,
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": QUIET,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
MEMORY_GIB = re.compile(r"(.+)_(gib|gb)\Z")


def _matplotlib():
    try:
        import matplotlib  # pylint: disable=import-outside-toplevel
        from matplotlib import ticker  # pylint: disable=import-outside-toplevel
        from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise AnsibleFilterError(INSTALL) from None
    return matplotlib, ticker, Figure


class Plots:
    """The plots of one comparison; each method gives SVG, or None where there is nothing to draw."""

    def __init__(self, comparison, prefix):
        self.matplotlib, self.ticker, self.figure_class = _matplotlib()
        self.comparison, self.prefix, self.count = comparison, prefix, 0

    def _draw(self, paint, height=HEIGHT_IN):
        with self.matplotlib.rc_context(STYLE):
            figure = self.figure_class(figsize=(WIDTH_IN, height), layout="constrained")
            axes = figure.add_subplot()
            if paint(axes) is False:
                return None
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        self.count += 1
        return Markup(page_svg(out.getvalue(), f"{self.prefix}-{self.count}"))

    def _lines(self, axes, x_of, y_of, label_points=False):
        drawn = False
        for number, profile in enumerate(self.comparison["profiles"]):
            cells = [cell for cell in profile["cells"] if x_of(cell) is not None and y_of(cell) is not None]
            if not cells:
                continue
            drawn = True
            x, y = [x_of(cell) for cell in cells], [y_of(cell) for cell in cells]
            middle_x = [figure["median"] if isinstance(figure, dict) else figure for figure in x]
            middle_y = [figure["median"] for figure in y]
            look = number % len(SERIES)
            axes.errorbar(
                middle_x,
                middle_y,
                yerr=_spread(y),
                xerr=_spread(x) if isinstance(x[0], dict) else None,
                color=SERIES[look],
                marker=MARKERS[look],
                linestyle=DASHES[look],
                capsize=3,
                elinewidth=1.2,
                markeredgecolor=PAPER,
                markeredgewidth=0.8,
            )
            if label_points:
                for cell, at_x, at_y in zip(cells, middle_x, middle_y):
                    axes.annotate(
                        str(cell["concurrency"]), (at_x, at_y), (5, 5), textcoords="offset points", fontsize=8.5, color=INK
                    )
        return drawn

    def _over_concurrency(self, axes):
        measured = sorted({cell["concurrency"] for profile in self.comparison["profiles"] for cell in profile["cells"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(_apart(measured), labels=[str(point) for point in _apart(measured)])
        axes.minorticks_off()
        if len(measured) == 1:
            axes.set_xlim(measured[0] / 2, measured[0] * 2)
        axes.set_xlabel("requests at once")

    def throughput(self):
        """Tokens a second over concurrency, with the crossings."""

        def paint(axes):
            if not self._lines(axes, lambda cell: cell["concurrency"], lambda cell: cell["output_tok_s"]):
                return False
            self._over_concurrency(axes)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("output tokens a second")
            for crossing in self.comparison["crossover"]["crossings"]:
                if crossing["at"] is not None:
                    axes.axvline(crossing["at"], color=INK, linewidth=0.9, linestyle=":")
                    axes.annotate(
                        str(crossing["at"]), (crossing["at"], 0.02), (3, 0), xycoords=("data", "axes fraction"),
                        textcoords="offset points", fontsize=8.5, color=INK,
                    )  # fmt: skip
            return True

        return self._draw(paint)

    def latency(self, figure, name):
        """A latency against throughput, each point with its concurrency."""

        def paint(axes):
            if not self._lines(axes, lambda cell: cell["output_tok_s"], lambda cell: cell[figure], label_points=True):
                return False
            axes.set_ylabel(f"{name}, median, ms")
            axes.set_xlabel("output tokens a second (beside a point: requests at once)")
            low, high = axes.get_ylim()
            if min(low, high) > 0 and high / low > 12:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(self.ticker.LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(self.ticker.FuncFormatter(lambda value, _position: f"{value:g}"))
                axes.yaxis.set_minor_formatter(self.ticker.NullFormatter())
            else:
                axes.set_ylim(bottom=0)
            axes.margins(x=0.08)
            return True

        return self._draw(paint)

    def acceptance(self):
        """Acceptance length over concurrency."""

        def paint(axes):
            if not self._lines(axes, lambda cell: cell["concurrency"], lambda cell: cell["accept_length"]):
                return False
            self._over_concurrency(axes)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("tokens accepted a step")
            return True

        return self._draw(paint)

    def start(self):
        """Seconds of each stage of a start, one bar a profile."""
        profiles = [profile for profile in self.comparison["profiles"] if profile["ready_s"]]
        stages = stages_of(self.comparison)

        def paint(axes):
            left = [0.0] * len(profiles)
            for number, stage in enumerate(stages):
                wide = [(profile["stages"].get(stage) or {"median": 0.0})["median"] for profile in profiles]
                axes.barh(
                    range(len(profiles)), wide, left=left, height=0.62, color=SERIES[number % len(SERIES)],
                    edgecolor=PAPER, linewidth=1.2,
                )  # fmt: skip
                left = [before + more for before, more in zip(left, wide)]
            ready = [profile["ready_s"] for profile in profiles]
            axes.errorbar(
                [figure["median"] for figure in ready],
                range(len(profiles)),
                xerr=_spread(ready),
                fmt="none",
                color=INK,
                ecolor=INK,
                capsize=4,
            )
            axes.set_yticks(range(len(profiles)), labels=[_short(profile["name"]) for profile in profiles])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_xlabel("seconds from the launch, median of the boots")

        return self._draw(paint, 1.1 + 0.42 * len(profiles)) if profiles and stages else None

    def memory(self):
        """Memory planned (a stroke) and observed (a bar), by profile."""
        rows = []
        for number, profile in enumerate(self.comparison["profiles"]):
            told = [row for row in profile["memory"] if MEMORY_GIB.match(row["figure"]) and row["planned"] and row["observed"]]
            if told:
                rows.append((None, profile["name"], number))
                rows += [(row, memory_name(row["figure"]), number) for row in told]

        def paint(axes):
            for at, (row, label, number) in enumerate(rows):
                if row is None:
                    axes.annotate(
                        _short(label, 40), (0, at), (2, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                        va="center", fontweight="bold",
                    )  # fmt: skip
                    continue
                axes.barh(at, row["observed"]["median"], height=0.6, color=SERIES[number % len(SERIES)], alpha=0.75)
                planned = row["planned"]["median"]
                axes.plot([planned, planned], [at - 0.42, at + 0.42], color=INK, linewidth=2.2)
            axes.set_yticks(
                [at for at, row in enumerate(rows) if row[0]], labels=[label for row, label, _number in rows if row]
            )
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel("GiB on the card, GB on the host")

        return self._draw(paint, 0.9 + 0.27 * len(rows)) if rows else None


def _apart(values):
    """Those of the values that can stand below each other's axis without touching, on a scale of powers of two."""
    kept = []
    for value in values:
        if not kept or value / kept[-1] >= 1.45:
            kept.append(value)
    return kept


def _spread(figures):
    return [
        [figure["median"] - figure["min"] for figure in figures],
        [figure["max"] - figure["median"] for figure in figures],
    ]


def _short(name, most=18):
    return name if len(name) <= most else name[: most - 1] + "…"


def memory_name(figure):
    """A figure of a plan as people call it: ``weights``, ``KV``, ``state (conv)``."""
    stem, unit = MEMORY_GIB.match(figure).groups() if MEMORY_GIB.match(figure) else (figure, None)
    names = {
        "weights": "weights",
        "draft_weights": "draft weights",
        "kv": "KV cache",
        "mamba_conv": "state, conv",
        "mamba_ssm": "state, ssm",
        "host_kv": "host KV",
        "host_mamba": "host state",
        "kv_tokens": "KV tokens",
        "mamba_slots": "state slots",
        "max_running_requests": "max running",
    }
    name = names.get(stem, stem.replace("_", " "))
    return f"{name}, GB" if unit == "gb" else name


def stages_of(comparison):
    """Stages of a start that any profile had, in their order."""
    return list(dict.fromkeys(stage for profile in comparison["profiles"] for stage in profile["stages"]))


def page_svg(text, prefix):
    """A drawing of matplotlib as a part of a page: its colours are the page's, its names are its own, its size is free."""
    text = text[text.index("<svg") :]
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    text = f'{head} aria-hidden="true" focusable="false">{rest}'
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    return re.sub("|".join(COLOURS), lambda found: f"var({COLOURS[found.group()]})", text)


def _looks(names):
    return [{"name": name, "colour": n % len(SERIES), "mark": MARKS[MARKERS[n % len(MARKERS)]]} for n, name in enumerate(names)]


def _drawn(profiles):
    """The looks of the profiles that have a line; the star is the one that tables have."""
    looks = _looks([profile["name"] + "*" * bool(profile["caveats"]) for profile in profiles])
    return [look for look, profile in zip(looks, profiles) if profile["cells"]]


def page(found, made_at):
    """Comparisons (filter sglang_comparisons) as HTML. ``made_at``: when, as text."""
    if not isinstance(found, list):
        raise AnsibleTypeError(f"sglang_compare_page needs a list of comparisons, got {type(found).__name__}")
    if not found:
        raise AnsibleFilterError("there is nothing to report yet: compare.yml measures profiles")
    sections = []
    for number, one in enumerate(found, start=1):
        plots = Plots(one, f"c{number}")
        sections.append(
            {
                "it": one,
                "profiles": _drawn(one["profiles"]),
                "stages": [{**look, "mark": "■"} for look in _looks(stages_of(one))],
                "throughput": plots.throughput(),
                "ttft": plots.latency("ttft_ms", "TTFT"),
                "tpot": plots.latency("tpot_ms", "TPOT"),
                "acceptance": plots.acceptance(),
                "memory": plots.memory(),
                "start": plots.start(),
            }
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        shown=lambda figure, digits=1: filter_loader.get("sglang_figure").j2_function(figure, digits) or "–",
        workload=filter_loader.get("sglang_workload_text").j2_function,
        memory_name=memory_name,
        is_size=lambda figure: bool(MEMORY_GIB.match(figure)),
    )
    return environment.get_template("report.html.j2").render(sections=sections, made_at=made_at, colours=len(SERIES))


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"sglang_compare_page": page}
