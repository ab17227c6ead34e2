"""Plans that know that links take streaming multiprocessors (SMs) from compute. (abstract; the model is ours)

A collective that becomes ready beside a long matrix product waits for SMs until that ends, and a product beside
collectives slows by S / (S - c) (`simulate.Slowdown`). So a product that is about to start is held back for a
collective that is about to be ready: links go first. A span does that, as both start together. The degrees stay: to
split products without splitting their collectives is not possible in a block's graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cluster import Cluster
from ..cost import durations
from ..plan import Plan
from ..simulate import Slowdown, issue_order, simulate_pass, slowdown
from ..spans import candidates, pin
from ..tasks import Pass, Span

Ordered = tuple[tuple[str, ...], tuple[Span, ...]]


def sm_aware(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with other spans and the order that goes with them, where that is faster under contention."""
    slow = slowdown(cluster)
    if slow is None or not plan.barriers:
        return plan
    graph = plan.graph
    forward, forward_spans = _best(graph.forward, (plan.forward, plan.forward_spans), cluster, slow)
    backward, backward_spans = _best(graph.backward, (plan.backward, plan.backward_spans), cluster, slow)
    return replace(plan, forward=forward, forward_spans=forward_spans, backward=backward,
                   backward_spans=backward_spans).check()


def _best(pass_: Pass, given: Ordered, cluster: Cluster, slow: Slowdown) -> Ordered:
    seconds = durations(pass_, cluster)
    order, spans = given
    tries = [given, pin(pass_, order, seconds, contention=slow)[:2], links_first(pass_, order, seconds, slow)]
    return min(tries, key=lambda t: simulate_pass(pass_, t[0], seconds, t[1], slow).makespan)


def links_first(pass_: Pass, order: Sequence[str], seconds: Mapping[str, float], slow: Slowdown) -> Ordered:
    """Spans of each collective in turn, of those that are possible the one that makes the pass fastest, if any does."""
    spans: tuple[Span, ...] = ()
    timeline = simulate_pass(pass_, order, seconds, contention=slow)
    for name in [e.task.name for e in sorted(timeline.events, key=lambda e: e.start) if e.task.is_collective]:
        for span in candidates(timeline.events, name):
            try:
                trial = simulate_pass(pass_, order, seconds, (*spans, span), slow)
            except ValueError:   # the tasks wait for each other
                continue
            if trial.makespan < timeline.makespan:
                spans, timeline = (*(s for s in spans if s.task != name), span), trial
    return issue_order(timeline), spans
