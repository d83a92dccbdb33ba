"""One-way partition: targets hear nothing of the drafts."""

from chaos.faults.link import Link
from chaos.shape import Shape


class PartitionUp(Link):
    name = "partition_up"
    up = Shape(is_held=True)
    down = Shape()
    evidence = "held"
