"""What is in the hosts' memory: whether there is a host, whether a plan fits in it, and whether it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cost_models import Cluster
from passes.plan import Plan
from passes.plan.host_memory import host_bytes_by_node
from passes.plan.step_plan import ACTIVATIONS, ALL, ON_HOST, OPTIMIZER
from passes.plan.text_tables import format_bytes
from planner.pipeline_ilp.stage_problem import as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import AUTO, NEVER, Demands
from planner.whole_step.candidates.no_plan import NoPlan
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.plan_of_solution import memory_by_rank, with_bound

#: A plan that offloads is taken over one that does not if it is better by more than this share.
CLEARLY_BETTER = 0.01
#: By what ``offload`` says, what is planned: a later way is taken over an earlier one if it is clearly better.
_WAYS: Mapping[str, tuple[str, ...]] = {
    NEVER: (NEVER,),
    OPTIMIZER: (OPTIMIZER,),
    ACTIVATIONS: (NEVER, ACTIVATIONS),
    ALL: (OPTIMIZER, ALL),
    AUTO: (NEVER, OPTIMIZER, ACTIVATIONS, ALL),
}
#: By objective, what the better plan has less of.
_FIGURES: Mapping[str, Callable[[Plan], float]] = {
    "time": lambda plan: plan.step.costs.simulated,
    "memory": lambda plan: max(rank.total for rank in plan.step.memory),
    "devices": lambda plan: float(plan.step.num_devices),
    "plainest": lambda plan: plan.step.costs.simulated,
}


def check_host(cluster: Cluster, demands: Demands) -> None:
    """Raise ValueError if something is to be offloaded on a cluster of which no host is known."""
    if not _asks_for_host(demands):
        return
    by_name = demands.offload not in (NEVER, AUTO)
    asked = f"offload={demands.offload!r}" if by_name else f"recompute={ON_HOST!r}"
    if cluster.host is None:
        raise ValueError(
            f"{asked} needs to know the host's memory and links, and cluster {cluster.name!r} has no "
            "[host] table: add one to its file (memory_bytes, memory_bandwidth, link_bandwidth), or drop it"
        )
    if cluster.has_unequal_devices:
        raise ValueError(
            f"{asked} is planned on equal devices, and those of cluster {cluster.name!r} are unequal: "
            'drop it, or count all as the slowest (unequal = "slowest" in the cluster file, --unequal slowest)'
        )


def _asks_for_host(demands: Demands) -> bool:
    """Whether something is demanded, or allowed by its name, that takes a host."""
    return demands.offload not in (NEVER, AUTO) or ON_HOST in demands.fixed.get("recompute", ())


def plan_as_demanded(cluster: Cluster, demands: Demands, objective: str, plan_with: Callable[[Demands], Plan]) -> Plan:
    """The plan with on the hosts what ``demands.offload`` says; of ``"auto"`` the best one.

    Args:
        plan_with: plans for demands whose ``offload`` and ``training`` say what is on the hosts.

    Raises:
        ValueError: as ``plan_with``, and without a host to offload to.
    """
    check_host(cluster, demands)
    without_hosts = cluster.host is None or cluster.has_unequal_devices
    ways = (NEVER,) if demands.offload == AUTO and without_hosts else _WAYS[demands.offload]
    if ON_HOST in demands.fixed.get("recompute", ()) and demands.offload != AUTO:
        ways = ways[-1:]  # activations are there anyway
    plans: list[Plan] = []
    for offload in ways:
        try:
            plans.append(plan_with(_offloading(demands, offload)))
        except ValueError:  # nothing fits; what contradicts itself does so again
            if offload == ways[-1] and not plans:
                raise
    figure, best = _FIGURES[objective], plans[0]
    for plan in plans[1:]:
        if figure(plan) < figure(best) * (1.0 - CLEARLY_BETTER):
            best = plan
    return with_bound(best, min(plan.certificate.bound for plan in plans))


def _offloading(demands: Demands, offload: str) -> Demands:
    """The demands with ``offload``, one of ``OFFLOADS`` but ``AUTO``, in all that says it."""
    training = dataclasses.replace(demands.training, offload=offload in (OPTIMIZER, ALL))
    return dataclasses.replace(demands, offload=offload, training=training)


def room_on_host(search: Search) -> float:
    """Bytes that a plan may have in the memory of one host."""
    host = search.cluster.host
    return float("inf") if host is None else host.memory_bytes * (1.0 - search.demands.headroom)


def uses_host(demands: Demands) -> bool:
    """Whether something of a plan may be in the hosts' memory."""
    return demands.training.offload or demands.offloads_activations


def fullest_host(search: Search, solution: StepSolution) -> float:
    """Bytes in the memory of the host that holds most."""
    cluster = search.cluster
    if cluster.host is None or not uses_host(search.demands):
        return 0.0
    memory = memory_by_rank(search, solution, as_step(solution.problem, solution.assignment))
    node_size = cluster.host.num_devices(cluster.levels)
    return max(host_bytes_by_node(solution.candidate.layout.sizes, memory, node_size))


def fits_on_host(search: Search, solution: StepSolution) -> bool:
    """Whether the hosts can hold what a solution offloads."""
    return fullest_host(search, solution) <= room_on_host(search)


def within_hosts(search: Search, outcome: Outcome) -> Outcome:
    """The outcome with the solutions that the hosts can hold; if there are none, the bytes of the least that lacks."""
    if not uses_host(search.demands) or not outcome.solutions:
        return outcome
    bytes_of = [(fullest_host(search, solution), solution) for solution in outcome.solutions]
    fitting = [solution for num_bytes, solution in bytes_of if num_bytes <= room_on_host(search)]
    least = 0.0 if fitting else min(num_bytes for num_bytes, _ in bytes_of)
    return dataclasses.replace(outcome, solutions=fitting, host_bytes=least)


def with_divided_state(demands: Demands) -> Demands | None:
    """``demands`` with ZeRO 1 at least, which has state on a host once; None if they say so, or say otherwise."""
    stages = demands.among("zero", (0, 1, 2, 3))
    if 0 not in stages or len(stages) == 1:
        return None
    without = demands.forbidden.get("zero", frozenset()) | {0}
    return dataclasses.replace(demands, forbidden={**demands.forbidden, "zero": without})


def without_activations(demands: Demands) -> Demands | None:
    """``demands`` with activations on devices; None if they are there, or are demanded on the hosts."""
    if not demands.offloads_activations or ON_HOST in demands.fixed.get("recompute", ()):
        return None
    return _offloading(demands, OPTIMIZER if demands.training.offload else NEVER)


def _what_is_there(demands: Demands) -> str:
    there = {"optimizer state": demands.training.offload, "activations": demands.offloads_activations}
    return ", ".join(name for name, is_there in there.items() if is_there)


def host_too_small(search: Search, outcome: Outcome) -> NoPlan:
    """The error for solutions that fit on the devices, but not on the hosts."""
    cluster = search.cluster
    assert cluster.host is not None
    lacking, there = format_bytes(outcome.host_bytes), format_bytes(cluster.host.memory_bytes)
    return NoPlan(
        f"no plan fits in the hosts' memory: what is there ({_what_is_there(search.demands)}) takes {lacking} on the "
        f"fullest host at least, of whose {there} a plan may take {format_bytes(room_on_host(search))}. What would "
        "help, each by itself: more nodes; an optimizer with less state (sgd_momentum); less headroom; hosts with more "
        "memory"
    )
