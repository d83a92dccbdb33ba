"""8 kB/s each way: less than drafting needs."""

from chaos.faults.link import Link
from chaos.shape import Shape


class LinkRate(Link):
    name = "link_rate"
    up = Shape(rate_bytes_s=8000)
    down = Shape(rate_bytes_s=8000)
    evidence = "late"
