"""Everything arrives in pieces of 7 bytes."""

from chaos.faults.link import Link
from chaos.shape import Shape


class LinkSlices(Link):
    name = "link_slices"
    up = Shape(slice_bytes=7)
    down = Shape(slice_bytes=7)
    evidence = "bytes"
