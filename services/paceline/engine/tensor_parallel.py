"""One model over several processes: the ranks' group, and the passes that rank 0 leads.

Every rank holds a share of the weights and of the KV heads and runs the same forwards in the same
order. Rank 0 broadcasts the rows of each pass as plain integers and is the only one whose logits
are used. It alone has Medusa heads, not shared: the hidden states that they look at are the same
on every rank. A rank that fails cannot be brought back into step: the group is then broken for
good.

Knows torch.distributed and nothing of who starts the processes, of tokens' meaning or of Ray.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from paceline.config import ModelConfig
from paceline.engine.base import EngineBroken
from paceline.engine.draft_head import DRAFT_VOCAB
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.runner import ModelRunner
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_hf_config, load_runner, pick_device
from paceline.errors import ConfigError

# int32 words of the first message of a pass, its length included. A decode or verify pass over 32
# sequences of 1000 tokens fits; a longer plan takes a second message.
MESSAGE_WORDS = 4096
STOP = -1
_MOVES = -2  # instead of the number of items: slots to copy
_NO_BLOCK = -1

JOIN_TIMEOUT = timedelta(seconds=60)
# Ranks load at their own pace, and afterwards sit idle in a receive for as long as nobody asks.
LOADING_TIMEOUT = timedelta(hours=2)
IDLE_TIMEOUT = timedelta(days=3650)

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, slots=True)
class Moves:
    """KV slots to copy, between two passes: see `Runner.move`."""

    slots: list[tuple[int, int]]


def pack_rows(rows: Sequence[SequenceRows]) -> torch.Tensor:
    """int32 [words]: the number of items, six numbers per item, all tokens, blocks and parents."""
    words = [len(rows)]
    for item in rows:
        copied = _NO_BLOCK if item.copied_block is None else item.copied_block
        words += [item.start, item.num_samples, copied]
        words += [len(item.token_ids), len(item.blocks), len(item.tree_parents)]
    for item in rows:
        words += item.token_ids
    for item in rows:
        words += item.blocks
    for item in rows:
        words += item.tree_parents
    return torch.tensor(words, dtype=torch.int32)


def unpack_rows(words: torch.Tensor) -> list[SequenceRows]:
    """What `pack_rows` was given."""
    numbers: Iterator[int] = iter(words.tolist())
    heads = [tuple(islice(numbers, 6)) for _ in range(next(numbers))]
    token_ids = [tuple(islice(numbers, num_tokens)) for *_, num_tokens, _, _ in heads]
    blocks = [tuple(islice(numbers, num_blocks)) for *_, num_blocks, _ in heads]
    parents = [tuple(islice(numbers, num_nodes)) for *_, num_nodes in heads]
    return [
        SequenceRows(
            start,
            tokens,
            num_samples,
            table,
            None if copied == _NO_BLOCK else copied,
            tree_parents=tree,
        )
        for (start, num_samples, copied, *_), tokens, table, tree in zip(
            heads, token_ids, blocks, parents, strict=True
        )
    ]


def pack_moves(slots: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int32 [words]: pairs (source, destination), told from rows by the first word."""
    return torch.tensor([_MOVES, *chain.from_iterable(slots)], dtype=torch.int32)


def unpack(words: torch.Tensor) -> list[SequenceRows] | Moves:
    """What `pack_rows` or `pack_moves` was given."""
    if words[0] != _MOVES:
        return unpack_rows(words)
    return Moves([(source, destination) for source, destination in words[1:].view(-1, 2).tolist()])


def check_shardable(model: ModelConfig, hf_config: Any) -> None:
    """`ConfigError` when `model.tensor_parallel_size` ranks cannot share this model."""
    size, kind = model.tensor_parallel_size, hf_config.model_type
    text = hf_config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"{kind}: transformers has no tensor parallel plan for it; set tensor_parallel_size: 1"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ConfigError(
            f"{kind}: {heads} attention heads and {kv_heads} KV heads cannot be shared by "
            f"tensor_parallel_size {size}; choose a size that divides both"
        )
    if model.quantization != "none":
        raise ConfigError(
            f"quantization {model.quantization} does not work with tensor_parallel_size {size}; "
            "choose one of the two"
        )
    device, seen = pick_device(model.device), torch.accelerator.current_accelerator(True)
    if device.type != (seen.type if seen else "cpu") or device.index:
        raise ConfigError(
            f"model.device {model.device} with tensor_parallel_size {size}: ranks use the first "
            f"device that they see ({seen or 'cpu'}); hide the others (CUDA_VISIBLE_DEVICES)"
        )


def bind_listener(host: str) -> socket.socket:
    """Where rank 0 of a new group is to be found: a listening socket on a free port of `host`."""
    return socket.create_server((host, 0))


class RankGroup:
    """The membership of this process, which can be in one group only and leaves it by ending.

    `rank` and `size` number the processes. `sharding` is what transformers shall do with the
    weights. Whatever a pass waits for fails after `timeout_s`.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self.sharding = DistributedConfig(tp_size=size, tp_plan="auto")
        self._timeout = timedelta(seconds=timeout_s)
        # On the CPU even where the model is not: integers from one process to the others.
        self._commands = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    @classmethod
    def join(
        cls,
        model: ModelConfig,
        rank: int,
        address: tuple[str, int],
        host: str,
        listener: socket.socket | None = None,
    ) -> RankGroup:
        """Meet the other ranks at `address`, where rank 0 brings the `listener`.

        `host` is this process's own address: connections between ranks use its interface.
        """
        size, device = model.tensor_parallel_size, pick_device(model.device)
        _use_interface_of(host)
        store = dist.TCPStore(
            *address,
            is_master=listener is not None,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(0)
            os.environ["LOCAL_RANK"] = "0"  # transformers switches to the device that it names
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=LOADING_TIMEOUT,
            device_id=torch.device("cuda", 0) if is_cuda else None,
        )
        return cls(rank, size, model.tensor_parallel_timeout_s)

    def finish_loading(self, hf_model: Any, folder: Path, *, needs_output: bool = False) -> Any:
        """Wait until every rank has its weights; from now on nothing may take longer than a pass.

        Returns the output layer, whole where rank 0 `needs_output` for its heads. That is a copy
        on every rank, through one gather: it takes the room of a whole layer until it is let go
        of, which the caller does as soon as it has taken its rows.
        """
        dist.barrier(group=self._commands)
        is_needed = torch.tensor([needs_output], dtype=torch.int32)
        self._broadcast(is_needed, LOADING_TIMEOUT)
        self._limit_passes()
        output, is_cut = hf_model.get_output_embeddings(), (folder / DRAFT_VOCAB).is_file()
        if is_cut or is_needed:
            output = _whole_layer(output)
        if is_cut:  # every rank keeps it: a cut one is too small to be worth sharing
            hf_model.set_output_embeddings(output)
        return output

    def _limit_passes(self) -> None:
        # transformers makes the groups of its device mesh itself, with torch's default timeout
        # of up to 30 minutes.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self._commands:
                # NCCL's watchdog kills the process: the engine's own watch shall speak first.
                factor = 2 if dist.get_backend(group) == "nccl" else 1
                dist.distributed_c10d._set_pg_timeout(factor * self._timeout, group)

    def send(self, rows: Sequence[SequenceRows]) -> None:
        """Have the other ranks run this pass."""
        self._send(pack_rows(rows))

    def send_moves(self, slots: Sequence[tuple[int, int]]) -> None:
        """Have the other ranks copy these slots."""
        self._send(pack_moves(slots))

    def _send(self, body: torch.Tensor) -> None:
        head, rest = body[: MESSAGE_WORDS - 1], body[MESSAGE_WORDS - 1 :]
        self._broadcast(_first_message(len(body), head), self._timeout)
        if len(rest):
            self._broadcast(rest, self._timeout)

    def send_stop(self) -> None:
        """Have the other ranks end."""
        self._broadcast(_first_message(STOP, torch.empty(0, dtype=torch.int32)), self._timeout)

    def receive(self) -> list[SequenceRows] | Moves | None:
        """The next pass of rank 0, or None when there will be no more."""
        message = torch.empty(MESSAGE_WORDS, dtype=torch.int32)
        self._broadcast(message, IDLE_TIMEOUT)
        num_words = int(message[0])
        if num_words == STOP:
            return None
        rest = torch.empty(max(0, num_words - (MESSAGE_WORDS - 1)), dtype=torch.int32)
        if len(rest):
            self._broadcast(rest, IDLE_TIMEOUT)
        return unpack(torch.cat([message[1 : 1 + num_words], rest]))

    def _broadcast(self, message: torch.Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timeout
        self._commands.broadcast([message], options).wait()


class TensorParallelRunner:
    """Rank 0's runner: has the others run each pass as well. See `Runner`.

    Raises `EngineBroken` as soon as a pass fails on any rank, and from then on always.
    """

    def __init__(self, runner: ModelRunner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group
        self._broken: Exception | None = None
        self.dtype, self.device = runner.dtype, runner.device

    def forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        with self._in_step():
            self._group.send(rows)
            return self._runner.forward(rows)

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        with self._in_step():
            self._group.send_moves(slots)
            self._runner.move(slots)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        if self._broken is not None:
            raise EngineBroken(f"a rank was lost before: {self._broken}")
        try:
            yield
        except Exception as error:
            # Whatever it was, the ranks are no longer in step.
            self._broken = error
            raise EngineBroken(f"a pass over {self._group.size} ranks failed: {error}") from error

    def head_logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self._runner.head_logits(rows)

    def close(self) -> None:
        """Let the other ranks end; does nothing in a broken group."""
        if self._broken is None:
            self._broken = EngineBroken("closed")
            self._group.send_stop()


def follow(model: ModelConfig, folder: Path, group: RankGroup) -> Callable[[], None]:
    """Load another rank's share; what it returns runs the passes of rank 0 until it stops.

    Any failure of a pass comes through.
    """
    runner, _ = load_runner(model, folder, group=group)

    def serve() -> None:
        with torch.inference_mode():
            while (rows := group.receive()) is not None:
                if isinstance(rows, Moves):
                    runner.move(rows.slots)
                else:
                    runner.forward(rows)

    return serve


def load_leader(
    model: ModelConfig,
    folder: Path,
    group: RankGroup,
    *,
    draft_top_n: int | None = None,
    medusa: Path | None = None,
) -> tuple[TorchEngine, TensorParallelRunner]:
    """Rank 0's engine, and the runner to close when it is no longer needed. `medusa`: the folder
    of its heads."""
    share, info = load_runner(model, folder, group=group, medusa=medusa)
    runner = TensorParallelRunner(share, group)
    engine = TorchEngine(
        runner,
        info,
        draft_top_n=draft_top_n,
        enable_prefix_caching=model.enable_prefix_caching,
    )
    return engine, runner


def check_folder(model: ModelConfig, folder: Path) -> None:
    """`check_shardable` for the model in `folder`."""
    check_shardable(model, load_hf_config(folder))


def _first_message(num_words: int, head: torch.Tensor) -> torch.Tensor:
    message = torch.zeros(MESSAGE_WORDS, dtype=torch.int32)
    message[0] = num_words
    message[1 : 1 + len(head)] = head
    return message


def _whole_layer(head: Any) -> torch.nn.Linear:
    """A copy with all rows, from the shares of all ranks, which call this together."""
    whole = torch.nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
    whole.weight = torch.nn.Parameter(head.weight.full_tensor(), requires_grad=False)
    if head.bias is not None:
        whole.bias = torch.nn.Parameter(head.bias.full_tensor(), requires_grad=False)
    return whole


def _use_interface_of(host: str) -> None:
    """Gloo and NCCL take their interface from the environment; a choice made there is kept."""
    name = interface_of(host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_of(host: str) -> str | None:
    """The network interface that has the IPv4 address `host`; None: let the libraries choose."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # this one has no IPv4 address, or this is no Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
