"""Lower bounds of the step of a candidate that waits in the heap, from seconds of one micro-batch."""

from __future__ import annotations

from cost_models import Cluster
from planner.pipeline_ilp.stage_bounds import memory_shortfall
from planner.whole_step.candidate_problems import CandidateProblems
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.costs.byte_weights import ALL_WEIGHTS, LONGER, reducing_seconds
from planner.whole_step.costs.candidate_bounds import Bounds
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.costs.split_fills import bound_of_sharding, terms_of_all
from planner.whole_step.limited_search import LimitedSearch
from planner.whole_step.search_entry import SearchEntry


class BoundedSearch(LimitedSearch):
    """The problems of all candidates, the limits of a search among them, and bounds before any problem is solved."""

    def __init__(self, level_one: LevelOne, cluster: Cluster, demands: Demands) -> None:
        super().__init__(level_one, cluster, demands)
        self.bounds = Bounds(level_one, demands.training)

    def share_prices(self, other: CandidateProblems) -> None:
        """Take over what ``other`` has priced, bounded and proved, for the same demands but for gap and limits."""
        super().share_prices(other)
        if isinstance(other, BoundedSearch):
            self.bounds = other.bounds

    def _bound(self, entry: SearchEntry, seconds: float) -> float:
        """Lower bound of the step if a micro-batch takes ``seconds`` beside ``entry.beside``."""
        least = self.step_bound(entry.candidate, max(seconds + entry.beside, entry.launched))
        return max([least, *(times * seconds + rest for times, rest in self._filled(entry))])

    def _filled(self, entry: SearchEntry) -> list[tuple[float, float]]:
        """Pairs (times, rest) of what fills the pipeline: the step is at least times · (seconds of a micro-batch beside
        ``entry.beside``) + rest."""
        candidate = entry.candidate
        if candidate.layout.pipeline == 1 or self.cluster.has_unequal_devices:
            return []
        undivided = self.bounds.undivided(candidate.cut.pieces)
        return terms_of_all(candidate, undivided, beside=entry.beside, copied=entry.copied)

    def step_bound(self, candidate: Candidate, seconds: float) -> float:
        """Lower bound of a candidate's step if one micro-batch takes ``seconds``, as level 1 counts them."""
        return candidate.bound(seconds)

    def _enough(self, entry: SearchEntry, cutoff: float) -> float:
        """Seconds of a micro-batch from which on ``_bound`` is at least ``cutoff``."""
        enough = cutoff / self.step_bound(entry.candidate, 1.0) - entry.beside
        return min([enough, *((cutoff - rest) / times for times, rest in self._filled(entry) if times > 0)])

    def _bound_of_sharding(self, entry: SearchEntry, sharded: Sharded) -> float:
        """Lower bound of an entry's step under one sharding, from what fills its pipeline."""
        if entry.candidate.layout.pipeline == 1 or self.cluster.has_unequal_devices:
            return 0.0
        return bound_of_sharding(entry.candidate, sharded.by_phase, beside=entry.beside, copied=entry.copied)

    def _is_known(self, entry: SearchEntry, sharded: Sharded) -> bool:
        """Whether a lower price of bytes gave the same sharding."""
        lighter = [weight for weight in ALL_WEIGHTS if weight < entry.weight]
        before = self.sharded(entry.candidate, lighter[-1]) if lighter else None
        return before is not None and before.is_same(sharded)

    def reduces_longer(self, candidate: Candidate, sharded: Sharded, bound: float) -> bool:
        """Whether a step of at least ``bound`` seconds reduces its gradients longer than if the tensor axis cut all
        parameters, by more than the gap lets pass."""
        links = self.links_on(candidate.layout)
        seconds = reducing_seconds(sharded.figures, candidate.layout, links, self.demands.training)
        return seconds - self.bounds.reducing(candidate, links) > LONGER * self.demands.gap * bound

    def lacks_memory(self, candidate: Candidate, sharded: Sharded) -> bool:
        """Whether a candidate cannot fit in memory under one sharding, over how many data ranks ZeRO ever divides."""
        return memory_shortfall(self.problem(self.leanest(candidate), sharded)) > 0
