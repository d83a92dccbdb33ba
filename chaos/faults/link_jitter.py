"""0 to 200 ms each way, drawn for each chunk."""

from chaos.faults.link import Link
from chaos.shape import Shape


class LinkJitter(Link):
    name = "link_jitter"
    up = Shape(delay_s=0.1, jitter_s=0.1)
    down = Shape(delay_s=0.1, jitter_s=0.1)
    evidence = "late"
