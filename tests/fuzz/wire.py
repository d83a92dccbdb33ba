"""`python -m tests.fuzz.wire --num 1000000 --seed 0`: mutated messages against live ends.

Every message is either decoded and acted on, or refused with RemoteProtocolError. Nothing else may
be raised, nothing may hang or grow, and the sequences in flight must end with their exact texts.
An episode depends on (seed, episode) alone; a failure prints the line that brings it back.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.rpc.codec import (
    decode_draft,
    decode_target,
    draft_codec,
    encode_draft,
    encode_target,
    target_codec,
)
from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb
from tests.fuzz.ears import DirectEar, Ear, StreamEar
from tests.fuzz.mutations import Mutator
from tests.fuzz.world import RPC, VOCAB_SIZE, World
from tests.rpc import messages as m

EPISODE_MESSAGES = 1000
TICK_MESSAGES = 24
HONEST_SHARE = 0.8  # of what live ends say, what arrives
TEMPLATE_LIMITS = WireLimits.from_config(RPC, m.VOCAB_SIZE)
LIMITS = WireLimits.from_config(RPC, VOCAB_SIZE)


@dataclass
class Tally:
    """What happened, and a digest of it: equal seeds must give equal digests."""

    num_messages: int = 0
    num_refused: int = 0
    num_ticks: int = 0
    num_texts: int = 0
    num_closed_streams: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    at_desk: Counter[str] = field(default_factory=Counter)
    num_accepted_tokens: int = 0
    digest: int = 0


def bodies(sealed: list[bytes], frame_type: type[Any]) -> list[bytes]:
    """Templates in the small vocabulary of the toy world."""
    found = []
    for data in sealed:
        frame = frame_type.FromString(pb.SpeculateRequest.FromString(data).body)
        _fold_ids(frame)
        found.append(frame.SerializeToString())
    return found


def _fold_ids(node: Any) -> None:
    for field_, value in node.ListFields():
        if field_.name.endswith("token_ids"):
            value[:] = [token_id % VOCAB_SIZE for token_id in value]
        elif field_.message_type is not None:
            for child in value if field_.is_repeated else (value,):
                _fold_ids(child)


DRAFT_TEMPLATES = bodies(encode_draft(m.DRAFT_MESSAGES, TEMPLATE_LIMITS), pb.DraftFrame)
TARGET_TEMPLATES = bodies(encode_target(m.TARGET_MESSAGES, TEMPLATE_LIMITS), pb.TargetFrame)


class Episode:
    """One world, fuzzed from both ends. `through_streams` puts a PeerStream before each ear."""

    def __init__(self, rng: random.Random, tally: Tally, through_streams: bool) -> None:
        self.world = World(rng)
        self._rng = rng
        self._tally = tally
        self._through_streams = through_streams
        self._as_draft = Mutator(rng, pb.DraftFrame, LIMITS, DRAFT_TEMPLATES, {})
        self._as_target = Mutator(rng, pb.TargetFrame, LIMITS, TARGET_TEMPLATES, {})
        self._target_ears: dict[int, Ear] = {}
        self._draft_ears: dict[int, Ear] = {}

    async def run(self, num_messages: int) -> None:
        left = num_messages
        while left > 0:
            count = min(left, TICK_MESSAGES)
            left -= count
            await self._tick(count)
        await self._close_all()
        self.world.finish()
        self._tally.num_messages += num_messages
        self._tally.num_texts += self.world.num_finished
        self._tally.num_closed_streams += self.world.num_closed_streams
        self._tally.seen += self.world.seen
        self._tally.at_desk += self.world.desk.counts
        self._tally.num_accepted_tokens += self.world.scheduler.stats.num_accepted_tokens

    async def _tick(self, num_fuzzed: int) -> None:
        """A little honest traffic, a lot of lies, one pass."""
        world, rng = self.world, self._rng
        world.fill()
        self._as_draft.hints = self._as_target.hints = world.hints()
        to_target: dict[int, list[bytes]] = {link_id: [] for link_id in world.drafts}
        to_draft: dict[int, list[bytes]] = {link_id: [] for link_id in world.drafts}
        for link_id, messages in world.take_outbox().items():
            to_draft[link_id] += self._honest(encode_target(messages, LIMITS), self._as_target)
        for link_id, messages in world.draft_pass().items():
            to_target[link_id] += self._honest(encode_draft(messages, LIMITS), self._as_draft)
        links = list(world.drafts)
        for _ in range(num_fuzzed):
            if rng.random() < 0.5:
                to_target[rng.choice(links)].append(self._as_draft.next())
            else:
                to_draft[rng.choice(links)].append(self._as_target.next())
        await self._hear(to_target, to_draft)
        world.tick()
        self._tally.num_ticks += 1
        for ears in (self._target_ears, self._draft_ears):
            for link_id in ears.keys() - world.drafts.keys():
                await ears.pop(link_id).close()

    def _honest(self, sealed: list[bytes], mutator: Mutator) -> list[bytes]:
        for data in sealed:
            mutator.learn(data)
        return [data for data in sealed if self._rng.random() < HONEST_SHARE]

    async def _hear(
        self, to_target: dict[int, list[bytes]], to_draft: dict[int, list[bytes]]
    ) -> None:
        for link_id, sealed in to_draft.items():
            self._rng.shuffle(sealed)
            ear = self._draft_ears.setdefault(link_id, self._ear(at_draft=True))
            heard = await ear.hear(sealed)
            self._digest(sealed, heard)
            answers = self.world.tell_draft(link_id, heard)
            to_target[link_id] += self._honest(encode_draft(answers, LIMITS), self._as_draft)
        for link_id, sealed in to_target.items():
            self._rng.shuffle(sealed)
            ear = self._target_ears.setdefault(link_id, self._ear(at_draft=False))
            heard = await ear.hear(sealed)
            self._digest(sealed, heard)
            self.world.tell_target(link_id, heard)
        for link_id in list(self.world.drafts):
            if self._target_ears[link_id].is_deaf or self._draft_ears[link_id].is_deaf:
                self.world.hang_up(link_id)

    def _ear(self, at_draft: bool) -> Ear:
        codec: Any = draft_codec(LIMITS) if at_draft else target_codec(LIMITS)
        if not self._through_streams:
            return DirectEar(codec, self._tally.refused)
        decode: Any = decode_draft if at_draft else decode_target
        return StreamEar(codec, lambda data: decode(data, LIMITS), self._tally.refused, at_draft)

    async def _close_all(self) -> None:
        for ears in (self._target_ears, self._draft_ears):
            for ear in ears.values():
                await ear.close()
            ears.clear()

    def _digest(self, sealed: list[bytes], heard: list[Any]) -> None:
        said = b"%d" % len(heard) + b"".join(sealed)
        self._tally.digest = zlib.crc32(said, self._tally.digest)


def fuzz_episode(seed: int, episode: int, num_messages: int, tally: Tally) -> None:
    """Every tenth episode goes through streams."""
    rng = random.Random(f"{seed}:{episode}")
    asyncio.run(Episode(rng, tally, episode % 10 == 9).run(num_messages))
    tally.num_refused = tally.refused.total()


def fuzz(seed: int, num_messages: int, only: int | None = None) -> Tally:
    """Raises what an episode raises, after the line that brings it back."""
    tally = Tally()
    num_episodes = -(-num_messages // EPISODE_MESSAGES)
    for episode in range(num_episodes) if only is None else (only,):
        size = min(EPISODE_MESSAGES, num_messages - episode * EPISODE_MESSAGES)
        size = EPISODE_MESSAGES if only is not None else size
        try:
            fuzz_episode(seed, episode, size, tally)
        except BaseException:
            print(f"replay: python -m tests.fuzz.wire --seed {seed} --episode {episode}")
            raise
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1_000_000, help="fuzzed messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, help="run this episode only")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a refused message is a log line
    began = time.perf_counter()
    tally = fuzz(options.seed, options.num, options.episode)
    seconds = time.perf_counter() - began
    gc.collect()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"seed {options.seed}: {tally.num_messages} fuzzed messages in {seconds:.0f} s,")
    print(f"  {tally.num_messages / seconds:.0f} messages/s, digest {tally.digest:08x}")
    print(f"  {tally.num_ticks} passes, {tally.num_texts} texts ended, all exact;")
    print(f"  {tally.num_accepted_tokens} proposals were accepted all the same")
    print(f"  {tally.num_closed_streams} streams closed for misdeeds, peak {peak_mib:.0f} MiB")
    print(f"  {tally.num_refused} messages refused, {tally.seen.total()} entries acted on:")
    print("   ", ", ".join(f"{kind} {number}" for kind, number in tally.seen.most_common()))
    print("  at the desk:", ", ".join(f"{k} {n}" for k, n in tally.at_desk.most_common()))
    print("  refusals by kind:")
    for words, number in tally.refused.most_common(12):
        print(f"    {number:8} {words}")


if __name__ == "__main__":
    main()
