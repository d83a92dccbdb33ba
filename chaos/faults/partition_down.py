"""One-way partition: drafts hear nothing of the targets."""

from chaos.faults.link import Link
from chaos.shape import Shape


class PartitionDown(Link):
    name = "partition_down"
    up = Shape()
    down = Shape(is_held=True)
    evidence = "held"
