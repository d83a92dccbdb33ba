"""Two-way partition between drafts and targets."""

from chaos.faults.link import Link
from chaos.shape import Shape


class PartitionBoth(Link):
    name = "partition_both"
    up = Shape(is_held=True)
    down = Shape(is_held=True)
    evidence = "held"
