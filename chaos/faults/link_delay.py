"""100 ms each way: drafts are behind by several passes."""

from chaos.faults.link import Link
from chaos.shape import Shape


class LinkDelay(Link):
    name = "link_delay"
    up = Shape(delay_s=0.1)
    down = Shape(delay_s=0.1)
    evidence = "late"
