"""The engine's own thread: adds once, frees first, and lets every exception through."""

import asyncio
import threading

import pytest

from paceline.engine.base import EngineInfo, OutOfBlocks, StepItem
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker, PassResult, monotonic_us
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

INFO = EngineInfo("toy", vocab_size=64, max_model_len=128, block_size=4, num_blocks=4)
GREEDY = SamplingParams(temperature=0)


class LoggingEngine(ToyEngine):
    """A toy engine that remembers what was asked of it, and from which thread."""

    def __init__(self):
        super().__init__(INFO)
        self.calls = []
        self.threads = set()

    def _log(self, *call):
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def add(self, sequence_id):
        self._log("add", sequence_id)
        super().add(sequence_id)

    def free(self, sequence_id):
        self._log("free", sequence_id)
        super().free(sequence_id)

    def step(self, items):
        self._log("step", *(item.sequence_id for item in items))
        return super().step(items)


def rows(sequence_id, *token_ids, start=0):
    return StepItem(sequence_id, start, token_ids, 1, GREEDY)


@pytest.fixture
def engine():
    return LoggingEngine()


@pytest.fixture
def worker(engine):
    made = EngineWorker(engine)
    yield made
    made.close()


async def test_adds_once(worker, engine):
    await worker.run([], [rows(1, 5), rows(2, 6)])
    await worker.run([], [rows(1, 7, start=1), rows(3, 8)])
    assert engine.calls == [
        ("add", 1),
        ("add", 2),
        ("step", 1, 2),
        ("add", 3),
        ("step", 1, 3),
    ]


async def test_results_are_the_engines(worker):
    done = await worker.run([], [rows(1, 5, 6), rows(2, 6)])
    fresh = ToyEngine(INFO)
    fresh.add(1)
    fresh.add(2)
    assert done.results == fresh.step([rows(1, 5, 6), rows(2, 6)])


async def test_frees_before_the_pass(worker, engine):
    """The blocks of the one that left are needed by the one that comes."""
    await worker.run([], [rows(1, *range(16))])
    await worker.run([1], [rows(2, *range(16))])
    assert engine.calls[-3:] == [("free", 1), ("add", 2), ("step", 2)]


async def test_an_id_that_comes_back_starts_empty(worker, engine):
    await worker.run([], [rows(1, 5, 6, 7)])
    done = await worker.run([1], [rows(1, 5)])
    assert done.results == (await worker.run([], [rows(2, 5)])).results[:0] + done.results
    assert engine.cached_len(1) == 1
    assert engine.calls.count(("add", 1)) == 2


async def test_frees_only_what_it_added_and_once(worker, engine):
    """A sequence that was aborted before its first pass is unknown to the engine."""
    await worker.run([], [rows(1, 5)])
    await worker.run([9, 1, 1], [])
    await worker.run([1], [])
    assert engine.calls == [("add", 1), ("step", 1), ("free", 1)]


async def test_without_items_there_is_no_pass(worker, engine):
    done = await worker.run([], [])
    assert done.results == []
    assert engine.stats().num_passes == 0


async def test_out_of_blocks_comes_through_and_changes_nothing(worker, engine):
    await worker.run([], [rows(1, *range(8))])
    with pytest.raises(OutOfBlocks):
        await worker.run([], [rows(2, *range(20, 32))])
    assert (engine.cached_len(1), engine.cached_len(2)) == (8, 0)
    await worker.run([2], [rows(1, 9, start=8)])
    assert engine.calls[-2:] == [("free", 2), ("step", 1)]
    assert await worker.free_blocks(check=True) == 1


async def test_a_failed_sequence_is_not_added_again(worker, engine):
    with pytest.raises(OutOfBlocks):
        await worker.run([], [rows(1, *range(20))])
    await worker.run([], [rows(1, 5)])
    assert engine.calls.count(("add", 1)) == 1


async def test_a_pass_without_room_can_be_tried_again_without_its_newest(worker, engine):
    """Preemption: the newest sequence is released, the rest of the same pass goes on."""
    await worker.run([], [rows(1, *range(8)), rows(2, *range(30, 35))])
    with pytest.raises(OutOfBlocks):
        await worker.run([], [rows(1, 9, start=8), rows(2, 9, start=5), rows(3, 40)])
    assert (engine.cached_len(1), engine.cached_len(2), engine.cached_len(3)) == (8, 5, 0)
    done = await worker.run([3, 2], [rows(1, 9, start=8)])
    assert [result.cached_len for result in done.results] == [9]
    assert done.num_free_blocks == 1
    # the one that was preempted comes back under its own id, and finds what is left of it
    await worker.run([1], [])
    done = await worker.run([], [rows(2, *range(30, 36))])
    assert [result.num_prefix_tokens for result in done.results] == [4]
    assert engine.calls.count(("add", 2)) == 2
    await worker.run([1, 2, 3], [])
    assert await worker.free_blocks(check=True) == INFO.num_blocks
    assert engine.stats().num_sequences == 0


async def test_other_exceptions_come_through(worker):
    with pytest.raises(LocalProtocolError, match="start 3, but 0 are cached"):
        await worker.run([], [rows(1, 5, start=3)])
    assert (await worker.run([], [rows(1, 5)])).results[0].sequence_id == 1


async def test_one_thread_and_not_the_event_loops(worker, engine):
    await asyncio.gather(*(worker.run([], [rows(i, 5)]) for i in range(4)))
    assert len(engine.threads) == 1
    assert threading.current_thread().name not in engine.threads
    assert all(name.startswith("paceline-engine") for name in engine.threads)


async def test_passes_keep_their_order(worker, engine):
    await asyncio.gather(*(worker.run([], [rows(i, 5)]) for i in (3, 1, 2)))
    assert [call for call in engine.calls if call[0] == "step"] == [
        ("step", 3),
        ("step", 1),
        ("step", 2),
    ]


async def test_times_are_the_process_clock(worker):
    before = monotonic_us()
    done = await worker.run([], [rows(1, 5)])
    assert isinstance(done, PassResult)
    assert before <= done.started_us <= done.ended_us <= monotonic_us()


async def test_free_blocks_counts_and_checks(worker, engine):
    assert await worker.free_blocks(check=True) == 4
    await worker.run([], [rows(1, 1, 2, 3, 4, 5)])
    assert await worker.free_blocks(check=True) == 2
    engine._kv[engine._pool.table(1).blocks[0]][2] += 1
    with pytest.raises(AssertionError):
        await worker.free_blocks(check=True)


def test_info(worker):
    assert worker.info == INFO


async def test_nothing_runs_after_close(engine):
    worker = EngineWorker(engine)
    await worker.run([], [rows(1, 5)])
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await worker.run([], [rows(1, 6, start=1)])
    assert engine.calls == [("add", 1), ("step", 1)]
    assert not [t for t in threading.enumerate() if t.name in engine.threads]
