# Copyright: sglang-fleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which flags to change: so that a plan fits, so that more requests run, so that as many run as are wanted.

Read by sglang_memory.py. Nothing is told that was not planned: every change is planned with all that it leads to, on the
card and on the host, and is dropped where that plan does not fit. What is tried, and in which order, is in
:class:`Rule`; the rest of this file only searches.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _beside(name):
    """A file of this folder as a module: filter_plugins is on no import path, and Ansible loads its files by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


planning = _beside("sglang_memory_pools")
sizing = planning.sizing
GIB = sizing.GIB
Flags = sizing.Flags
Plan = planning.Plan

FRACTION, RUNNING, SLOTS = "mem-fraction-static", "max-running-requests", "max-mamba-cache-size"
TOKENS, HOST = "max-total-tokens", "hicache-size"
LOSSY = {"mamba-ssm-dtype": "the state cache in bfloat16", "kv-cache-dtype": "the KV cache in fp8"}


class Rule:
    """What may be suggested. Judgement, not arithmetic: this is the place to put what measurements teach."""

    # A change is no help if it leaves less KV than one request of some length needs.
    least_tokens = 4096
    # Raising mem-fraction-static eats what graphs and activations live on. Where boots have told what graphs take, that much
    # and this for activations stays; else this share of the card: 0.92 on a 96 GB card leaves it, and that was booted.
    activations_gib = 1.0
    unlearned_share = 0.06
    # What is told beside the wish ends where measurements end: 48 requests, at 0.95 (docs/memory.md).
    most_running = 48
    most_fraction = 0.95

    @classmethod
    def kept_gib(cls, figures):
        """GiB that have to be left on the card where mem-fraction-static is raised."""
        if figures.graphs_gib is not None:
            return figures.graphs_gib + cls.activations_gib
        return max(cls.activations_gib, cls.unlearned_share * figures.free_gpu_gib)

    @staticmethod
    def options(plan, allow_lossy):
        """Sets of flags to try beside the counts, those that cost nothing first, then those that change least."""
        state, sizes = plan.model.state, plan.sizes
        lossless, lossy = [{}], []
        if plan.per_request == 5 and plan.release.has("lazy_extra_buffer"):
            lossless.append({"mamba-radix-cache-strategy": "extra_buffer_lazy"})
        if allow_lossy:
            lossy += [{"mamba-ssm-dtype": "bfloat16"}] if state and sizes.state_dtype == "float32" else []
            lossy += [{"kv-cache-dtype": "fp8_e4m3"}] if sizes.dtype in ("bfloat16", "bf16", "float32") else []
            lossy += [{**lossy[0], **lossy[1]}] if len(lossy) == 2 else []
        return lossless, [{**change, **free} for change in lossy for free in lossless]

    @classmethod
    def attempts(cls, plan, allow_lossy):
        """``(flags, whether mem-fraction-static may move)`` in the order of preference."""
        for group in cls.options(plan, allow_lossy):
            yield from ((option, False) for option in group)
            yield from ((option, True) for option in group)


def told(flags):
    """Flags as part of a sentence: ``a 1 with b 2 and c 3``."""
    words = [f"{name} {value}" for name, value in flags.items()]
    return " with ".join([words[0], " and ".join(words[1:])]) if words[1:] else words[0]


def most(low, high, good):
    """The largest whole number of ``low`` to ``high`` that is good, where no number above a bad one is; else None."""
    if high < low or not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


class Search:
    """Flags of one server on one card and node, and plans of changes to them."""

    def __init__(self, config, args, figures, plan=None):
        self.config, self.figures = config, figures
        self.today = plan or Plan(config, args, figures)
        self.given = self.today.flags.given

    def plan(self, flags):
        return Plan(self.config, flags, self.figures, self.today.model)

    def counts(self, running, flags):
        """The flags that let so many requests run on every worker."""
        workers = self.today.sizes.workers
        counts = {RUNNING: running * workers}
        if self.today.model.state:
            per_request = sizing.slots_per_request(Flags(flags), self.today.release, self.today.speculation)[0]
            counts[SLOTS] = running * per_request * workers
        return counts

    def fraction(self, flags, enough):
        """The ``mem-fraction-static`` closest to the given, in thousandths, that is enough and fits the card; else None.

        Lower: the largest that leaves what :meth:`Rule.kept_gib` tells, else that fits. Higher: the smallest that is enough, if
        it leaves as much.
        """

        def at(thousandth):
            return self.plan({**flags, FRACTION: thousandth / 1000})

        def serves(plan):
            return enough(plan) and on_card(plan)

        today = min(999, max(1, round(flags[FRACTION] * 1000)))
        # As it is given, the fraction may only be too low where all that it allocates finds room.
        for kept in () if roomy(at(today)) else (Rule.kept_gib(self.figures), 0):
            lower = most(1, today, lambda part, kept=kept: roomy(at(part), kept))
            if lower and serves(at(lower)):
                return lower / 1000
        short = most(today, 999, lambda part: not enough(at(part)))
        higher = 1 + (today if short is None else short)
        if higher > 999:
            return None
        plan = at(higher)
        return higher / 1000 if serves(plan) and plan.leaves(Rule.kept_gib(self.figures)) else None

    def bounded(self, flags, kept, least=1):
        """``flags``, with the largest ``max-total-tokens`` that leaves ``kept`` GiB where without one too little is left.

        Buffers that are freed become KV, and the pool of a draft with it that no fraction reckons with.
        """
        plan = self.plan(flags)
        if roomy(plan, kept):
            return flags
        tokens = most(least, plan.tokens, lambda count: roomy(self.plan({**flags, TOKENS: count}), kept))
        return {**flags, TOKENS: tokens or least}

    def on_host(self, flags):
        """``flags`` with a ``hicache-size`` that fits the node where theirs does not; None where none does."""
        room = self.figures.host_free_gb
        today = self.plan(flags)

        def pinned(plan):
            return room is None or plan.host.needed <= room - planning.HOST_RESERVE_GB

        def refused(plan):
            return any(kind == "host" for kind, _ in plan.causes)

        def at(size):
            return self.plan({**flags, HOST: size})

        if not refused(today):
            return flags
        if pinned(today):
            # Too small for releases that refuse a host pool below the card's.
            size = 1 + (most(1, 1 << 20, lambda size: any("refuses" in text for _, text in at(size).causes)) or 0)
        else:
            size = most(1, int(room), lambda size: pinned(at(size)))
        return {**flags, HOST: size} if size and not refused(at(size)) else None


def on_card(plan):
    return not any(kind == "card" for kind, _ in plan.causes)


def roomy(plan, kept=0):
    """Whether so much is left beside what is allocated and graphs where they are known: the lower the fraction, the sooner."""
    return plan.left >= 0 and plan.leaves(kept)


# -- what makes a plan fit ----------------------------------------------------------------------------------------------


def card_remedy(search):
    """Flags with which the card is enough: its fraction, or fewer requests, or both; None where nothing helps.

    A lower fraction is told as it is. A higher one is compared with fewer requests by the requests that run with KV for
    :attr:`Rule.least_tokens` each, then by KV tokens.
    """
    given, today = search.given, search.today

    def useful(plan):
        least = min(Rule.least_tokens, plan.flags.count(TOKENS, Rule.least_tokens))
        return plan.running > 0 and plan.tokens >= least

    def serves(flags):
        plan = search.plan({**given, **flags})
        return useful(plan) and on_card(plan)

    def at(count):
        return search.plan({**given, **search.counts(count, given)})

    def worth(flags):
        plan = search.plan({**given, **flags})
        return min(plan.running, plan.tokens // Rule.least_tokens), plan.tokens

    fraction = search.fraction(given, useful)
    if fraction and fraction <= given[FRACTION]:
        return {FRACTION: fraction}
    asked = today.requested or max(1, today.running)
    found = [{FRACTION: fraction}] if fraction else []
    running = most(1, asked, lambda count: serves(search.counts(count, given)))
    paid = most(1, running or 0, lambda count: at(count).tokens >= count * Rule.least_tokens)
    found += [search.counts(count, given) for count in dict.fromkeys((paid, running)) if count]
    if RUNNING in given and today.per_request and today.slots >= today.per_request:
        # With the slots as they are: what was held back for requests that can't run becomes KV.
        count = {RUNNING: min(asked, today.slots // today.per_request) * today.sizes.workers}
        flags = search.bounded({**given, **count}, Rule.kept_gib(search.figures))
        bounded = {name: value for name, value in flags.items() if given.get(name) != value}
        found += [bounded] if bounded and serves(bounded) else []
    if found:
        return max(found, key=worth)
    one = search.counts(1, given)
    fraction = search.fraction({**given, **one}, useful)
    return {FRACTION: fraction, **one} if fraction else None


def remedies(search):
    """``(flags, sentences)``: flags with which all fits, None if there are none; each cause with what helps against it."""
    plan, flags, card = search.today, dict(search.given), None
    kinds = {kind for kind, _ in plan.causes}
    if "card" in kinds:
        card = card_remedy(search)
        flags.update(card or {})
    host = None
    if "host" in kinds or (card and any(kind == "host" for kind, _ in search.plan(flags).causes)):
        host = search.on_host(flags)
        flags = host or flags
    against = {
        "card": f"{told(card)} fits" if card else "no change of flags helps: take a larger card or more GPUs for the server",
        "host": f"no {HOST} fits: leave enable-hierarchical-cache out",
    }
    if host:  # what helps the card may be enough for the host
        changed_size = host.get(HOST) != search.given.get(HOST)
        against["host"] = f"{HOST} {host[HOST]} fits" if changed_size else against["card"]
    if card and not host and not search.plan({**search.given, **card}).fits:
        against["card"] = f"{told(card)} fits the card, and the host needs another change"
    if card and host and card != {name: value for name, value in flags.items() if search.given.get(name) != value}:
        against["card"] = f"{told({**card, HOST: flags[HOST]})} fits"
    sentences = [text if kind == "other" else f"{text}: {against[kind]}" for kind, text in plan.causes]
    changed = {name: value for name, value in flags.items() if search.given.get(name) != value}
    fits = bool(changed) and search.plan(flags).fits
    return (changed if fits else None), sentences


# -- what makes more of a plan that fits ----------------------------------------------------------------------------------


def advise(search):
    """``[(flags, sentence)]`` of changes that help, the most helpful first; each was planned and fits."""
    plan, given = search.today, search.given
    if not plan.per_request or not plan.slots or not plan.running or not plan.fits:
        return []
    spare = (plan.requested or 0) - plan.running
    if spare <= 0:
        return []
    advice = []

    kept = min(Rule.kept_gib(search.figures), plan.left + plan.shared)

    def fitting(flags):
        """``(flags, plan)`` that fit, with a bound on tokens where what is freed would become more than there is room for."""
        changed = search.plan({**given, **flags})
        if not changed.leaves(kept):
            tokens = most(1, changed.tokens, lambda count: search.plan({**given, **flags, TOKENS: count}).leaves(kept))
            flags = {**flags, TOKENS: tokens or 1}
            changed = search.plan({**given, **flags})
        return (flags, changed) if changed.fits and changed.leaves(kept) else (None, None)

    drafts = plan.speculation.draft_tokens
    if drafts and not plan.release.has("buffers_follow_cap"):
        flags, changed = fitting({RUNNING: plan.running * plan.sizes.workers})
        if flags and changed.running >= plan.running and changed.tokens > plan.tokens:
            freed = (plan.reserved_buffers - changed.reserved_buffers) / GIB
            instead = f"{changed.tokens} KV tokens instead of {plan.tokens}"
            advice.append((flags, f"{told(flags)} frees {freed:.1f} GiB of speculative buffers: {instead}"))
    if plan.binding == "state slots":
        # As many as half of the KV tokens pay for.
        def pays(count):
            changed = search.plan({**given, **search.counts(count, given)})
            return changed.running >= count and 2 * changed.tokens >= plan.tokens

        running = most(plan.running + 1, plan.requested, pays)
        flags, changed = fitting(search.counts(running, given)) if running else (None, None)
        if flags and changed.running > plan.running and 2 * changed.tokens >= plan.tokens:
            instead = f"runs {changed.running} instead of {plan.running} and leaves {changed.tokens} of {plan.tokens} KV tokens"
            advice.append((flags, f"{told(flags)} {instead}"))
    return advice


# -- what lets as many run as are wanted ------------------------------------------------------------------------------------


class Wish(Search):
    """So many requests of so many tokens each."""

    def __init__(self, config, args, figures, context):
        super().__init__(config, args, figures)
        self.context = context

    def attempt(self, running, option, moves):
        """``(flags, plan)`` of ``running`` requests with the flags of ``option``; ``met`` tells whether they give it."""
        need = running * self.context
        flags = {**self.given, **option}
        flags.update(self.counts(running, flags))
        limit = Flags(flags).count(TOKENS)
        if limit and limit < need:
            flags[TOKENS] = need

        def enough(plan):
            return plan.running >= running and plan.tokens >= need

        plan = self.plan(flags)
        slack = min(Rule.kept_gib(self.figures), plan.slack)
        if enough(plan) and not roomy(plan, slack):
            # What was freed became KV, and the draft's pool with it, out of the slack: as many tokens as leave room.
            for kept in (slack, 0):
                bounded = self.bounded(flags, kept, least=need)
                if enough(self.plan(bounded)) and roomy(self.plan(bounded), kept):
                    flags, plan = bounded, self.plan(bounded)
                    break
        if moves and not (enough(plan) and on_card(plan)):
            fraction = self.fraction(flags, enough)
            flags = {**flags, FRACTION: fraction} if fraction else flags
        if plan.figures.host_free_gb is not None or any(kind == "host" for kind, _ in plan.causes):
            flags = self.on_host(flags) or flags
        plan = self.plan(flags)
        return enough(plan) and plan.fits, flags, plan

    def answer(self, running, option, moves):
        _met, flags, plan = self.attempt(running, option, moves)
        return self.told(flags, plan, option)

    def told(self, flags, plan, option):
        changed = {name: value for name, value in flags.items() if self.given.get(name) != value}
        lossy = [f"{name} {value}: {LOSSY[name]} costs accuracy" for name, value in option.items() if name in LOSSY]
        return {"args": changed, "plan": plan, "lossy": lossy}

    def nearest(self, below, allow_lossy):
        """The most requests, fewer than ``below``, that do run: ``{"running", "args", "plan", "lossy"}``, or None."""
        found, best = None, 0
        for option, moves in Rule.attempts(self.today, allow_lossy):
            if not moves:
                continue  # with leave to move the fraction there are never fewer

            def met(count, option=option):
                return self.attempt(count, option, True)[0]

            running = most(best + 1, below - 1, met)
            if running:
                best, found = running, {"running": running, **self.answer(running, option, True)}
        return found

    def more(self, above, option):
        """The most requests above ``above`` that run with ``option`` and flags that cost nothing; None if there are none.

        Tokens per second grew with the requests that ran, so whoever asks for fewer should know what there is.
        """
        found, best, highest = None, above, max(Rule.most_fraction, self.given[FRACTION])
        for free in Rule.options(self.today, False)[0]:
            kinds = {**option, **free}

            def met(count, kinds=kinds):
                good, _flags, plan = self.attempt(count, kinds, True)
                return good and plan.fraction <= highest and plan.leaves(Rule.kept_gib(self.figures))

            running = most(best + 1, Rule.most_running, met)
            if running:
                best, found = running, {"running": running, **self.answer(running, kinds, True)}
        return found

    def hindrances(self, wanted, allow_lossy):
        """Why so many do not run with flags that cost nothing."""
        _met, flags, plan = self.attempt(wanted, {}, True)
        need = wanted * self.context
        # What is told to be missing is missing at the highest fraction that leaves room for graphs, too.
        kept = Rule.kept_gib(self.figures)
        highest = most(1, 999, lambda part: roomy(self.plan({**flags, FRACTION: part / 1000}), kept))
        best = self.plan({**flags, FRACTION: highest / 1000}) if highest else plan
        plan = best if best.tokens >= plan.tokens else plan
        # Where weights fit, a card that is short of KV is told by the KV that is wanted.
        reasons = [text for kind, text in plan.causes if kind != "card" or plan.rest <= 0 or plan.tokens >= need]
        if plan.tokens < need:
            each = f"{wanted} requests x {self.context} tokens"
            reasons.append(f"{each} want {need} KV tokens; {plan.tokens} fit beside the rest with {FRACTION} {plan.fraction:g}")
        elif plan.running < wanted:
            reasons.append(f"{plan.running} of {wanted} requests would run: {plan.binding} cap them")
        if not allow_lossy and Rule.options(self.today, True)[1]:
            reasons.append("allow_lossy lets a narrower type of state or KV cache be tried")
        return reasons


def suggest(config, args, figures, running, context, allow_lossy):
    """``{"possible", "args", "plan", "lossy", "reasons", "nearest", "more"}`` with plans as :class:`Plan`."""
    wish = Wish(config, args, figures, context)
    today, nothing = wish.today, {"args": {}, "lossy": [], "reasons": [], "nearest": None, "more": None}
    if RUNNING in wish.given and on_card(today) and today.running >= running and today.tokens >= running * context:
        # What runs already needs no other flags on the card: freed buffers would only become tokens.
        flags = wish.on_host(wish.given) or wish.given
        plan = wish.plan(flags)
        if plan.fits:
            return {**nothing, "possible": True, **wish.told(flags, plan, {})}
    for option, moves in Rule.attempts(today, allow_lossy):
        if wish.attempt(running, option, moves)[0]:
            more = wish.more(running, option)
            return {**nothing, "possible": True, **wish.answer(running, option, moves), "more": more}
    return {
        **nothing, "possible": False, "plan": today, "reasons": wish.hindrances(running, allow_lossy),
        "nearest": wish.nearest(running, allow_lossy),
    }  # fmt: skip


class FilterModule:
    """No filter of its own: this file is read by sglang_memory.py, and Ansible loads every file of this folder."""

    def filters(self):
        return {}
