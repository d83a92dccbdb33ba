"""The target's side of one sequence: committed tokens, the window of proposals, the verdicts.

Decides everything about tokens; does no I/O. It does not know text, KV caches, other sequences,
threads, transports or time. Fallback is not a mode: with an empty window `begin_verify` returns
`()` and the pass is a plain decode step.

Layout of `log`: `[prompt | committed output | window]`; `committed_len` ends the second part.

Parts with modules of their own: `window_laws` (rejection modes, and why the output keeps the
target's law), `alternates` (branches, for tokens that the draft did not expect), `verifying`.
"""

from __future__ import annotations

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.generation import FinishReason
from paceline.proposers.base import NOTHING, LocalProposal
from paceline.protocol.alternates import Alternates
from paceline.protocol.link import LinkEvent, LinkState, next_state
from paceline.protocol.messages import DraftTokens, Opened, OpenSession, OpenStatus, Verdict
from paceline.protocol.rounds import Disposition, Step, TokenDelta
from paceline.protocol.token_log import TokenLog
from paceline.protocol.verifying import Verifying, cut_at_end, verify_local
from paceline.protocol.window_laws import WindowLaws
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

__all__ = ["Disposition", "Step", "TargetSession", "TokenDelta"]

MAX_POSITION = 2**31 - 1
MAX_UNTOLD = 32  # tokens that a draft which rests may lag behind


class TargetSession:
    """One sequence. `max_tokens` >= 1 counts output; `max_len` bounds prompt + output.

    `log`, if given, holds exactly the prompt and is taken over: hashing takes time.
    `output_token_ids` are output that was committed elsewhere: it goes on behind them.
    """

    def __init__(
        self,
        session_id: int,
        prompt_token_ids: tuple[int, ...],
        *,
        sampling: SamplingParams,
        mode: VerificationMode,
        max_tokens: int,
        max_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        max_draft_ahead: int = 16,
        log: TokenLog | None = None,
        output_token_ids: tuple[int, ...] = (),
    ) -> None:
        if not prompt_token_ids:
            raise LocalProtocolError("a sequence needs at least one prompt token")
        if max_tokens < 1 or len(prompt_token_ids) >= max_len:
            raise LocalProtocolError("no room for a single output token")
        self.session_id = session_id
        self.prompt_len = len(prompt_token_ids)
        self.sampling = sampling
        self.mode = mode
        self.end_len = min(self.prompt_len + max_tokens, max_len)
        self.stop_token_ids = stop_token_ids
        # How far the draft may run from the next open or verdict on; 0: it rests.
        self.max_draft_ahead = max_draft_ahead
        self.max_untold = MAX_UNTOLD
        self._fan_out = 0  # the one to tell the draft next
        self.log = TokenLog(prompt_token_ids) if log is None else log
        self.log.extend(output_token_ids)
        # Invariant: prompt_len <= committed_len <= len(log) <= granted_limit or committed_len.
        self.committed_len = self.prompt_len + len(output_token_ids)
        if self.committed_len >= self.end_len:
            raise LocalProtocolError("the output has ended: there is nothing to go on with")
        self.link = LinkState.LOST
        self.epoch = 0
        self.round = 0
        self.finish_reason: FinishReason | None = None
        # The draft may only speak about positions from here on (length at the last open).
        self._open_len = self.committed_len
        # What the draft has been told of. Invariant while attached: <= committed_len.
        self._told_len = self.committed_len
        # Largest limit ever granted in this epoch: a credit is never taken back.
        self._granted_limit = 0
        self._draft_max_len = MAX_POSITION
        # Newest round after which proposals in flight may rest on tokens we did not commit.
        self._flush_round = 0
        # Round at the last open: whatever a draft says in this epoch, it has seen that much.
        self._open_round = 0
        self._laws = WindowLaws(mode)
        # Largest fan_out ever granted in this epoch: without one there are no branches.
        self._granted_fan_out = 0
        self.alternates = Alternates()
        # Notes of the alternates that the last commit made the window, one for each token.
        self.num_adopted = 0
        self._verifying: Verifying | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.committed_len - self.prompt_len

    @property
    def window_len(self) -> int:
        """Proposals held beyond the committed tokens."""
        return len(self.log) - self.committed_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_attached(self) -> bool:
        """Whether a draft is told about commits (it may not have answered yet)."""
        return self.link in (LinkState.OPENING, LinkState.STREAMING)

    @property
    def has_draft_room(self) -> bool:
        """Whether the draft's own context reaches beyond the committed tokens."""
        return self.committed_len < self._draft_max_len

    @property
    def is_flushed(self) -> bool:
        """Whether the draft must hear our last verdict before its proposals can fit."""
        return self._flush_round == self.round

    @property
    def fan_out(self) -> int:
        """For so many runner-ups of each proposal the draft may prepare a branch; never in the
        rejection modes."""
        return 0 if self._laws.are_used else self._fan_out

    @fan_out.setter
    def fan_out(self, fan_out: int) -> None:
        self._fan_out = fan_out

    @property
    def verifying_probs(self) -> tuple[SparseProbs, ...]:
        """The laws of the proposals that `begin_verify` returned; () in the matching modes."""
        return () if self._verifying is None else self._verifying.probs

    @property
    def verifying_parents(self) -> tuple[int, ...]:
        """Of these proposals, if they are a tree."""
        return () if self._verifying is None else self._verifying.parents

    @property
    def limit_position(self) -> int:
        """No proposal at or beyond it: the last output token is always the target's own."""
        return min(self.committed_len + self.max_draft_ahead, self.end_len - 1, self._draft_max_len)

    # -- the link ---------------------------------------------------------------------------

    def reopen(self, draft_max_len: int = MAX_POSITION) -> OpenSession:
        """Hand the sequence to a (new) draft: the epoch rises, the window is emptied.

        `draft_max_len` is that draft's own context limit: no credit goes beyond it.
        """
        self._draft_max_len = draft_max_len
        self.link = next_state(self.link, LinkEvent.REOPEN)
        self.epoch += 1
        self.empty_window()
        self._open_len = self.committed_len
        self._flush_round = self._open_round = self.round
        self._granted_limit = self.limit_position
        self._granted_fan_out = self.fan_out
        self._told_len = self.committed_len
        return OpenSession(
            session_id=self.session_id,
            epoch=self.epoch,
            prompt_len=self.prompt_len,
            token_ids=self.log.slice(0, self.committed_len),
            sampling=self.sampling,
            mode=self.mode,
            limit_position=self._granted_limit,
            fan_out=self.fan_out,
        )

    def receive_opened(self, opened: Opened) -> bool:
        """False when the answer is stale (another epoch, or not waited for)."""
        if opened.epoch != self.epoch or self.link is not LinkState.OPENING:
            return False
        accepted = opened.status is OpenStatus.OK
        event = LinkEvent.ACCEPTED if accepted else LinkEvent.REFUSED
        self.link = next_state(self.link, event)
        return True

    def lose_draft(self, event: LinkEvent = LinkEvent.PEER_LOST) -> None:
        """The draft is gone. Proposals already here stay: they are as good as before."""
        self.link = next_state(self.link, event)

    def close(self) -> None:
        if self.link is not LinkState.CLOSED:
            self.link = next_state(self.link, LinkEvent.CLOSE)
        self.empty_window()

    def empty_window(self) -> None:
        """Forget the proposals, whatever they are: no law depends on that (C2)."""
        self.log.truncate(self.committed_len)
        self._laws.probs.clear()
        self.alternates.clear()
        self.num_adopted = 0

    # -- proposals --------------------------------------------------------------------------

    def receive_draft(self, draft: DraftTokens) -> Disposition:
        """Take proposals into the window, or those of a branch beside it.

        Raises `RemoteProtocolError` when the draft breaks a rule (speaks about tokens it was opened
        with, or beyond its credit, states laws that do not fit its proposals, or sends a branch
        that it was not allowed); the caller quarantines this session on that draft.
        """
        if draft.epoch != self.epoch or not self.is_attached:
            return Disposition.STALE_EPOCH
        if draft.start < self._open_len:
            raise RemoteProtocolError(f"draft at {draft.start}, opened at {self._open_len}")
        if draft.start + len(draft.token_ids) > self._granted_limit:
            raise RemoteProtocolError(f"draft beyond its limit {self._granted_limit}")
        if draft.is_branch and not self._granted_fan_out:
            raise RemoteProtocolError("a branch, and no fan-out was granted")
        self._laws.check(draft)
        seen_round = max(draft.last_round, self._open_round)
        if self._laws.is_stale(seen_round):
            return Disposition.STALE
        held = self._held_len(draft)
        if held is None and draft.is_branch:
            return self._hold(draft)
        if draft.start > len(self.log):
            return Disposition.GAP if seen_round >= self._flush_round else Disposition.STALE
        if held is None:
            return Disposition.DIVERGED
        if held == len(draft.token_ids):
            return Disposition.DUPLICATE
        self._extend_window(draft, held)
        return Disposition.KEPT

    def _held_len(self, draft: DraftTokens) -> int | None:
        """How many of its proposals the log has already; None when they do not go on from it."""
        if draft.start > len(self.log) or draft.context_hash != self.log.hash_at(draft.start):
            return None
        held = min(len(draft.token_ids), len(self.log) - draft.start)
        return held if self.log.common_len(draft.start, draft.token_ids) == held else None

    def _extend_window(self, draft: DraftTokens, held: int) -> None:
        stop = self._laws.add(draft, held)
        self.log.extend(draft.token_ids[held:stop])
        if stop < len(draft.token_ids):
            raise RemoteProtocolError(f"token {draft.token_ids[stop]} has no mass in its own law")

    def _hold(self, draft: DraftTokens) -> Disposition:
        """A branch that does not go on from the log. What is committed decides about its first
        tokens: it must agree with them, and then it reaches beyond (else the log had it all)."""
        start, token_ids, context_hash = draft.start, draft.token_ids, draft.context_hash
        num_decided = self.committed_len - start
        if num_decided >= 0:
            is_ours = context_hash == self.log.hash_at(start)
            if not is_ours or self.log.common_len(start, token_ids) < num_decided:
                return Disposition.STALE
            start, token_ids = self.committed_len, token_ids[num_decided:]
            context_hash = self.log.hash_at(start)
        is_new = self.alternates.put(start, context_hash, token_ids)
        return Disposition.ALTERNATE if is_new else Disposition.DUPLICATE

    def receive_nack(self, have_len: int) -> Verdict | None:
        """The draft misses commits: repeat them from `have_len` on (None: nothing to repeat)."""
        if not self._open_len <= have_len:
            raise RemoteProtocolError(f"nack at {have_len}, opened at {self._open_len}")
        if not self.is_attached or have_len >= self.committed_len:
            return None
        # A draft that missed a rejection must not miss its consequence.
        return self._verdict(
            have_len,
            self.log.slice(have_len, self.committed_len),
            num_accepted=0,
            has_rejection=self._laws.is_unheard(have_len),
        )

    # -- verification -----------------------------------------------------------------------

    def begin_verify(self, limit: int, local: LocalProposal = NOTHING) -> tuple[int, ...]:
        """Proposals for this pass, at most `limit`; () is a plain decode step.

        Those of the window, or `local` ones instead if there are any: the window stays as it is.
        In the rejection modes neither `limit` nor which of both it is may depend on what the
        window's proposals are (B1, C2), and `verifying_probs` has their laws.
        """
        if self._verifying is not None or self.is_finished:
            raise LocalProtocolError("begin_verify while verifying or after the end")
        count = max(0, min(limit, self.end_len - self.committed_len - 1))
        if local.token_ids:
            self._verifying = verify_local(local, count, self._laws.are_used)
        else:
            window = self.log.slice(self.committed_len, self.committed_len + count)
            self._verifying = Verifying(window, tuple(self._laws.probs[:count]))
        return self._verifying.token_ids

    def end_verify(self, acceptance: Acceptance) -> Step:
        """`commit`, and what the draft is to hear of it."""
        delta = self.commit(acceptance)
        return Step(delta, self.due_verdict(delta))

    def commit(self, acceptance: Acceptance, path: tuple[int, ...] | None = None) -> TokenDelta:
        """Commit accepted proposals and the target's own next token, cut at EOS and at the end.

        `path`: the accepted proposals, where a tree was verified.
        """
        verified = self._verifying
        if verified is None:
            raise LocalProtocolError("end_verify without begin_verify")
        self.cancel_verify()  # from here on no pass is open
        token_ids, origins = verified.accepted(acceptance, path)
        token_ids = self._cut(token_ids)
        num_draft, accepted = len(verified.token_ids), acceptance.num_accepted_tokens
        # Nobody has looked at the window where local proposals were refused.
        self._commit(token_ids, accepted < num_draft and not verified.is_local)
        return TokenDelta(
            round=self.round,
            token_ids=token_ids,
            origins=origins[: len(token_ids)],
            num_draft_tokens=num_draft,
            num_accepted_tokens=min(accepted, len(token_ids)),
            finish_reason=self.finish_reason,
            is_local=verified.is_local,
        )

    def due_verdict(self, delta: TokenDelta) -> Verdict | None:
        """Everything that the draft has not been told, `delta` at its end; the next pass may have
        begun. A draft that rests is told now and then: it could do nothing with it, and must not
        believe that it is forgotten."""
        num_untold = self.committed_len - self._told_len
        num_needed = 1 if self.max_draft_ahead else self.max_untold
        if not self.is_attached or num_untold < num_needed:
            return None
        told_len, self._told_len = self._told_len, self.committed_len
        are_its = not delta.is_local and num_untold == len(delta.token_ids)
        return self._verdict(
            told_len,
            self.log.slice(told_len, self.committed_len),
            delta.num_accepted_tokens if are_its else 0,
            has_rejection=self._laws.is_unheard(told_len),
        )

    def cancel_verify(self) -> None:
        """The pass did not happen (the engine failed or the request ended meanwhile)."""
        self._verifying = None

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        room = self.end_len - self.committed_len
        token_ids, self.finish_reason = cut_at_end(token_ids, room, self.stop_token_ids)
        return token_ids

    def _commit(self, token_ids: tuple[int, ...], has_rejection: bool) -> None:
        end = self.committed_len + len(token_ids)
        must_hear = end > len(self.log)
        conflict = self.log.set_tokens(self.committed_len, token_ids)
        self.committed_len = end
        self.round += 1
        if has_rejection and self._laws.reject(self.round, end):
            self.log.truncate(end)
            must_hear = True
        self._laws.move(len(token_ids), self.window_len)
        is_flushed = must_hear or conflict is not None
        if is_flushed:
            self._flush_round = self.round
        self._adopt(is_flushed=is_flushed)

    def _adopt(self, *, is_flushed: bool) -> None:
        """The branch that goes on from here, if one is held, is the window from now on.

        After a flush every other one is dead: it hangs on tokens that are not committed. What is
        adopted stays within the credit, as everything that is held.
        """
        self.num_adopted = 0
        if not self.alternates:
            return
        if not (self.window_len or self.is_finished):
            taken = self.alternates.take(self.committed_len, self.log.hash_at(self.committed_len))
            self.log.extend(taken)
            self.num_adopted = len(taken)
        if is_flushed:
            self.alternates.clear()
        else:
            self.alternates.drop_before(self.committed_len)

    def _verdict(
        self, start: int, token_ids: tuple[int, ...], num_accepted: int, has_rejection: bool
    ) -> Verdict:
        self._granted_limit = max(self._granted_limit, self.limit_position)
        self._granted_fan_out = max(self._granted_fan_out, self.fan_out)
        return Verdict(
            session_id=self.session_id,
            epoch=self.epoch,
            start=start,
            token_ids=token_ids,
            num_accepted_tokens=num_accepted,
            limit_position=self._granted_limit,
            round=self.round,
            has_rejection=has_rejection,
            fan_out=self.fan_out,
        )
