"""One bit of every fiftieth chunk is flipped, each way."""

from chaos.faults.link import Link
from chaos.shape import Shape


class CorruptWire(Link):
    name = "corrupt_wire"
    up = Shape(flip=0.02)
    down = Shape(flip=0.02)
    evidence = "flips"
