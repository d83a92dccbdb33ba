"""Readable scripts of the two sessions, after raft's testdata: commands and what follows from them.

Each `.txt` opens with what it shows. A block is one command, a line of dashes and the output.
After an intended change run `python tests/traces/test_traces.py` and read the diff.

    open prompt=1,2,3 max_tokens=8 ahead=4 [stop=9] [mode=block] [fan_out=1]    make both sessions
    draft 4 5/8 6           the draft model yields these tokens, one pass each; 8 is next likely
    branch 8: 10 11         ... and these for the branch that begins with 8
    prefill 2 5             a draft pass may compute 2 rows; with a prefix cache 5 tokens are cached
    send                    the draft puts its new proposals on the wire, those of branches behind
    begin 4 / end 4 5 7     a pass over at most 4 proposals starts / ends with the target's samples
    verify 4: 4 5 7         both at once
    verify 4: accept=1 7    in a rejection mode: the verdict of the rule
    deliver to_target | to_draft        the oldest message of that direction arrives
    drop to_target | to_draft           ... or is lost
    duplicate to_target | to_draft      ... or will arrive twice, the copy after all others
    kill                    the draft process dies; the target notices
    reopen                  a new draft takes the sequence over
"""

from collections import deque
from pathlib import Path

import pytest

from paceline.protocol.draft_session import DraftSession, Rewind, WorkResult
from paceline.protocol.messages import DraftTokens, Nack, Opened, OpenSession, OpenStatus, Verdict
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import Acceptance, accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs

FOLDER = Path(__file__).parent
TRACES = sorted(FOLDER.glob("*.txt"))
MAX_LEN = 64


def ids(token_ids):
    return "[" + " ".join(map(str, token_ids)) + "]"


def sentence(message):
    match message:
        case OpenSession():
            limit = message.limit_position
            return f"OpenSession epoch={message.epoch} {ids(message.token_ids)} limit={limit}"
        case Opened():
            return f"Opened epoch={message.epoch} {message.status}"
        case DraftTokens():
            return (
                f"DraftTokens epoch={message.epoch} start={message.start} {ids(message.token_ids)}"
                + (" of a branch" if message.is_branch else "")
            )
        case Verdict():
            return (
                f"Verdict epoch={message.epoch} start={message.start} {ids(message.token_ids)}"
                f" accepted={message.num_accepted_tokens} limit={message.limit_position}"
                + (" rejection" if message.has_rejection else "")
            )
        case Nack():
            return f"Nack epoch={message.epoch} have_len={message.have_len}"


class Pair:
    """A target session, a draft session and a fake wire between them."""

    def __init__(self):
        self.target = None
        self.draft = None
        self.wires = {"to_target": deque(), "to_draft": deque()}

    def run(self, command):
        name, _, rest = command.partition(" ")
        return [*getattr(self, name)(rest), *self.states()]

    def states(self):
        target, draft = self.target, self.draft
        committed = target.log.slice(0, target.committed_len)
        window = target.log.slice(target.committed_len)
        yield f"target {target.link} {ids(committed)} window {ids(window)}"
        if draft is None:
            yield "draft gone"
        else:
            end = draft.committed_len
            ahead = ids(draft.log.slice(end))
            yield f"draft {ids(draft.log.slice(0, end))} ahead {ahead} cached {draft.num_computed}"
        if len(target.alternates):
            yield f"target holds {len(target.alternates)} tokens of branches"

    # -- commands ---------------------------------------------------------------------------

    def open(self, rest):
        fields = dict(word.split("=") for word in rest.split())
        mode = VerificationMode(fields.get("mode", "greedy"))
        self.target = TargetSession(
            1,
            tuple(map(int, fields["prompt"].split(","))),
            sampling=SamplingParams(temperature=float(mode is not VerificationMode.GREEDY)),
            mode=mode,
            max_tokens=int(fields["max_tokens"]),
            max_len=MAX_LEN,
            stop_token_ids=frozenset(map(int, fields.get("stop", "99").split(","))),
            max_draft_ahead=int(fields["ahead"]),
        )
        self.target.fan_out = int(fields.get("fan_out", 0))
        return self.reopen("")

    def reopen(self, _):
        message = self.target.reopen()
        self.draft = DraftSession(message, max_len=MAX_LEN)
        self.target.receive_opened(Opened(1, message.epoch, OpenStatus.OK))
        return [sentence(message)]

    def kill(self, _):
        self.draft = None
        self.target.lose_draft()
        return []

    def draft_(self, rest):
        for word in rest.split():
            token_id, *runner_ups = map(int, word.split("/"))
            if not self.draft.can_draft():
                yield f"{token_id}: may not draft beyond limit {self.draft.limit_position}"
                return
            work = self.draft.begin_work(MAX_LEN)
            law = SparseProbs((token_id,), (TOTAL_WEIGHT,))  # which law is of no interest here
            result = WorkResult(token_id, draft_probs=law, runner_ups=tuple(runner_ups))
            became = self.draft.end_work(result)
            yield f"fed {ids(work.token_ids)} at {work.start}" + ("" if became else ": not wanted")

    def prefill(self, rest):
        max_rows, cached_len = map(int, rest.split())
        work = self.draft.begin_work(max_rows)
        self.draft.end_work(WorkResult(None, cached_len))
        yield f"asked for {ids(work.token_ids)} at {work.start}, at most {work.num_rows} rows"

    def branch(self, rest):
        first, _, drawn = rest.partition(":")
        for token_id in map(int, drawn.split()):
            ready = {branch.token_ids[0]: branch for _, branch in self.draft.ready_branches()}
            branch = ready[int(first)]
            work = self.draft.begin_branch(branch, branch.sequence_id or 1 + int(first))
            self.draft.end_branch(branch, WorkResult(token_id))
            yield f"fed {ids(work.token_ids)} at {work.start}"
        self.draft.branches.pass_over(branch)  # others get the rows: what there is may go

    def send(self, _):
        yield from self._put("to_target", self.draft.take_draft())
        for message in self.draft.take_branch_drafts():
            yield from self._put("to_target", message)

    def begin(self, rest):
        return [f"verify {ids(self.target.begin_verify(int(rest)))}"]

    def end(self, rest):
        words = rest.split()
        if words[0].startswith("accept="):
            acceptance = Acceptance(int(words[0][7:]), int(words[1]))
        else:
            acceptance = accept_matching(self.target._verifying.token_ids, tuple(map(int, words)))
        step = self.target.end_verify(acceptance)
        origins = " ".join(step.delta.origins)
        reason = step.delta.finish_reason
        yield f"commit {ids(step.delta.token_ids)} {origins}" + (f" ({reason})" if reason else "")
        yield from self._put("to_draft", step.verdict)

    def verify(self, rest):
        limit, _, sampled = rest.partition(":")
        return [*self.begin(limit), *self.end(sampled)]

    def drop(self, wire):
        return [f"lost {sentence(self.wires[wire].popleft())}"]

    def duplicate(self, wire):
        self.wires[wire].append(self.wires[wire][0])
        return [f"twice {sentence(self.wires[wire][0])}"]

    def deliver(self, wire):
        message = self.wires[wire].popleft()
        yield sentence(message)
        if wire == "to_target":
            yield from self._at_target(message)
        elif self.draft is not None:
            yield from self._at_draft(message)

    def _at_target(self, message):
        if isinstance(message, Nack):
            yield from self._put("to_draft", self.target.receive_nack(message.have_len))
            return
        disposition = self.target.receive_draft(message)
        yield disposition.value
        if disposition == "gap":
            nack = Nack(1, self.target.epoch, len(self.target.log))
            yield from self._put("to_draft", nack)

    def _at_draft(self, message):
        if isinstance(message, Nack):
            self.draft.receive_nack(message)
            return
        outcome = self.draft.receive_verdict(message)
        if isinstance(outcome, Rewind):
            promoted = ", a branch instead" if outcome.is_promoted else ""
            yield f"rewind to {outcome.length}, {outcome.num_dropped} dropped{promoted}"
        elif outcome is not None:
            yield from self._put("to_target", outcome)

    def _put(self, wire, message):
        if message is None:
            return ["nothing to send"]
        self.wires[wire].append(message)
        return [f"{wire}: {sentence(message)}"]


def replay(text):
    """The script with its outputs made anew."""
    pair = Pair()
    blocks = []
    for block in text.strip().split("\n\n"):
        command = block.split("\n---\n")[0]
        lines = command.splitlines()
        if all(line.startswith("#") for line in lines):
            blocks.append(command)
            continue
        verb = lines[-1]
        output = pair.run(verb.replace("draft ", "draft_ ", 1) if verb[:6] == "draft " else verb)
        blocks.append("\n".join([command, "---", *output]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path):
    text = path.read_text()
    assert replay(text) == text


def test_every_promised_trace_is_there():
    assert {path.stem for path in TRACES} >= {
        "full_accept",
        "reject_first",
        "reject_middle",
        "bonus_matches_draft",
        "bonus_diverges",
        "late_draft_after_rewind",
        "draft_killed_mid_window",
        "window_full",
        "eos_inside_draft",
        "max_tokens_inside_draft",
        "lost_draft_tokens",
        "lost_verdict",
        "stale_epoch",
        "plain_steps_feed_the_draft",
        "block_recovers_the_drafts_own_token",
        "stale_proposal_fits_after_rejection",
        "full_accept_keeps_what_nobody_looked_at",
        "prefix_cached_draft_prefill",
        "lost_verdict_of_a_rejection",
        "foreseen_correction",
        "lost_part_of_a_branch",
    }


if __name__ == "__main__":
    for trace in TRACES:
        trace.write_text(replay(trace.read_text()))
