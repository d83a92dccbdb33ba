"""Every twentieth chunk is lost and sent again, as TCP does it."""

from chaos.faults.link import Link
from chaos.shape import Shape


class LinkLoss(Link):
    name = "link_loss"
    up = Shape(loss=0.05)
    down = Shape(loss=0.05)
    evidence = "late"
