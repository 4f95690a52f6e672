"""Who holds what, where: rank ↔ mesh coordinates ↔ node, and parameter → shard, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class Layout:
    """Ranks laid over mesh axes, outermost first, nodes filled in rank order."""

    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int

    @classmethod
    def of(cls, plan: Plan, ranks_per_node: int) -> Layout:
        return cls(tuple((axis.axis, axis.size) for axis in plan.mesh), ranks_per_node)

    @property
    def ranks(self) -> int:
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return place

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates`; an axis left out counts as 0."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinates.get(name, 0)
        return number

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """All ranks that differ from `rank` only along `axis`, itself included, in axis order."""
        size = dict(self.axes)[axis]
        place = self.coordinates(rank)
        return tuple(self.rank({**place, axis: index}) for index in range(size))

    def data_index(self, rank: int) -> int:
        """Which part of the global batch `rank` reads, of `data_ranks` parts."""
        place = self.coordinates(rank)
        return place.get("replicate", 0) * dict(self.axes).get("shard", 1) + place.get("shard", 0)

    @property
    def data_ranks(self) -> int:
        sizes = dict(self.axes)
        return sizes.get("replicate", 1) * sizes.get("shard", 1)


def shard_rows(rows: int, parts: int, index: int) -> range:
    """The rows of dimension 0 that part `index` of `parts` holds: ceil(rows / parts) each, the last ones fewer or none (FSDP2's rule)."""
    size = -(-rows // parts)
    return range(min(index * size, rows), min((index + 1) * size, rows))
