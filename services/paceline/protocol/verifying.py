"""What a pass verifies of a sequence: proposals of its window, or local ones instead. Values only.

Local proposals are in no log: where they were wrong, nothing of the session has to be taken back,
and what the draft has sent meanwhile is as good as before.

In the rejection modes they are draws from one-hot laws: a local proposer is a function of the
committed text (math.md 2c), and so is how many of them there are (B1).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.errors import LocalProtocolError
from paceline.generation import FinishReason, TokenOrigin
from paceline.proposers.base import LocalProposal
from paceline.protocol.rounds import token_origins
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs


@dataclass(frozen=True, slots=True)
class Verifying:
    """`probs`: the laws of the proposals, in the rejection modes; `parents`: of a tree's nodes, as
    in `LocalProposal`; empty for a chain."""

    token_ids: tuple[int, ...] = ()
    probs: tuple[SparseProbs, ...] = ()
    parents: tuple[int, ...] = ()
    is_local: bool = False

    def accepted(
        self, acceptance: Acceptance, path: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[TokenOrigin, ...]]:
        """The tokens that are accepted with the target's own behind them, and their origins.

        `path`: of a tree, the tokens of the accepted nodes. Raises `LocalProtocolError` for what
        cannot have been accepted.
        """
        num = acceptance.num_accepted_tokens
        if not 0 <= num <= len(self.token_ids):
            raise LocalProtocolError(f"accepted {num} of {len(self.token_ids)}")
        if self.parents:
            if path is None or len(path) != num:
                raise LocalProtocolError(f"the {num} accepted nodes of a tree are not named")
            taken, is_full = tuple(path), self._is_leaf(self._node(path))
        else:
            taken, is_full = self.token_ids[:num], num == len(self.token_ids)
        origins = token_origins(num, num if is_full else num + 1)
        return (*taken, acceptance.next_token_id), origins

    def _node(self, path: Sequence[int]) -> int:
        """The node at the end of a path of tokens; -1: the committed text."""
        node = -1
        for token_id in path:
            node = self._child(node, token_id)
        return node

    def _child(self, parent: int, token_id: int) -> int:
        for node, above in enumerate(self.parents):
            if above == parent and self.token_ids[node] == token_id:
                return node
        raise LocalProtocolError(f"node {parent} of the tree has no child {token_id}")

    def _is_leaf(self, node: int) -> bool:
        return node not in self.parents


def verify_local(local: LocalProposal, limit: int, has_laws: bool) -> Verifying:
    """The first `limit` of local proposals: of a tree, whose nodes stand behind their parents, a
    smaller tree."""
    token_ids, parents = local.token_ids[:limit], local.parents[:limit]
    if not has_laws:
        return Verifying(token_ids, (), parents, is_local=True)
    if parents:
        raise LocalProtocolError("the rejection modes verify chains only")
    probs = tuple(SparseProbs((token_id,), (TOTAL_WEIGHT,)) for token_id in token_ids)
    return Verifying(token_ids, probs, is_local=True)


def cut_at_end(
    token_ids: tuple[int, ...], room: int, stop_token_ids: Collection[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The part to commit, at most `room` tokens; the earliest end wins, EOS before length."""
    for index, token_id in enumerate(token_ids[:room]):
        if token_id in stop_token_ids:
            return token_ids[: index + 1], "stop"
    return token_ids[:room], "length" if len(token_ids) >= room else None
