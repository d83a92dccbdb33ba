"""Which KV blocks hold text that another sequence may begin with. Pure; knows no tensor.

A full block is named by a digest of *all* tokens up to its end: its own, chained to its parent's
digest. KV depends on those tokens and on nothing else, so a block may be used by whatever
sequence begins with them, whether they were ever committed or not. The cache knows no sequence
and no reference count: its owner says when a block is used by nobody.

A chain begins at the root of its salt, so texts under different salts have no name in common: who
may not learn what another asked (by how fast an answer comes) gets a salt of its own. KV depends
on a LoRA adapter too, so an adapter is part of the salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

ROOT_DIGEST = b""
_DIGEST_SIZE = 16
_SALT_BYTES = 8
_SALT_PERSON = b"cache salt"  # no block's name can be the root of a salt
_ADAPTER_PERSON = b"adapter salt"


def root_digest(cache_salt: int) -> bytes:
    """Where the chains of a salt (u64) begin; 0 is no salt."""
    if cache_salt == 0:
        return ROOT_DIGEST
    salt = cache_salt.to_bytes(_SALT_BYTES, "little")
    return blake2b(salt, digest_size=_DIGEST_SIZE, person=_SALT_PERSON).digest()


def adapter_salt(cache_salt: int, adapter: str) -> int:
    """The salt (u64) under which a text's KV is kept: that of the request, and of the adapter that
    its rows are computed with. Without one it is the request's own: so it is at a draft, which has
    no adapters and computes the same KV whichever of them the target applies."""
    if not adapter:
        return cache_salt
    text = cache_salt.to_bytes(_SALT_BYTES, "little") + adapter.encode()
    digest = blake2b(text, digest_size=_SALT_BYTES, person=_ADAPTER_PERSON).digest()
    return int.from_bytes(digest, "little")


def chain_digest(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The name of a block: `parent` names the one before it, `token_ids` (u32) are its own."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_DIGEST_SIZE).digest()


class PrefixCache:
    """Names of full blocks, and which of them nobody uses, least recently used first."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # a dict keeps its order: the oldest comes first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle_blocks(self) -> tuple[int, ...]:
        """Least recently used first."""
        return tuple(self._idle)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        """The name of a block, None when it has none."""
        return self._digest_of.get(block)

    def register(self, block: int, digest: bytes) -> None:
        """Name a block that is used now. Of two blocks with one text, the first keeps the name."""
        if digest not in self._block_of:
            assert block not in self._digest_of, f"block {block} has another text's name"
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def unregister(self, block: int) -> None:
        """The block is about to be overwritten; nothing happens when it has no name."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def retire(self, block: int) -> None:
        """Nobody uses this named block any more: it is the last to be evicted."""
        self._idle[block] = None

    def revive(self, block: int) -> None:
        """An idle block is used again; nothing happens when it is in use already."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Forget the least recently used idle block and hand it out."""
        block = next(iter(self._idle))
        del self._idle[block]
        self.unregister(block)
        return block

    def check_integrity(self) -> None:
        """Raise AssertionError when names and blocks do not fit each other."""
        assert {digest: block for block, digest in self._digest_of.items()} == self._block_of, (
            "names and blocks differ"
        )
        assert self._idle.keys() <= self._digest_of.keys(), "an idle block has no name"
