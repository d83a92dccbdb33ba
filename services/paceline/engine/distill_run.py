"""From a target's folder to a draft, or Medusa heads, with a card: what `paceline distill` does.

Stages: data, hidden states, training, the result, its report. Each is kept in the work folder,
and the same job goes on there where it was stopped. Knows no terminal: a `Watch` is told.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig

from paceline.engine.chat_files import (
    MAX_CHATS_BYTES,
    MAX_TEXT_BYTES,
    Chat,
    check_file,
    write_chats,
)
from paceline.engine.convert import compose_draft, write_draft
from paceline.engine.distill import (
    CHECKPOINT,
    Budget,
    DraftObjective,
    Objective,
    StepReport,
    Trainer,
    draft_tensors,
    load_whole,
    no_report,
    read_progress,
    save_whole,
    train,
    write_asset,
)
from paceline.engine.distill_data import (
    Data,
    DataSettings,
    check_target,
    fingerprint,
    gather,
    load_examples,
    load_target,
    prepare,
    remember,
    use_device,
)
from paceline.engine.distill_folders import check_apart, claim_result, retract_report
from paceline.engine.distill_init import check_init, complete_recipe, start_from
from paceline.engine.distill_lineage import earlier_runs, held_out_note
from paceline.engine.distill_report import machine, report_draft, report_heads, write_report
from paceline.engine.draft_head import read_draft_vocab
from paceline.engine.medusa_training import HeadsObjective, write_heads
from paceline.engine.student import (
    FIT_CHATS,
    Example,
    Loss,
    Recipe,
    Student,
    choose_vocab,
    draft_config,
    fit_head_map,
    spread_layers,
)
from paceline.errors import ConfigError
from paceline.models import Progress, no_progress, sha256_of

HELD_OUT = "held_out.jsonl"
_VOCAB = "vocab.safetensors"
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class DistillJob:
    """`target`: a model folder; `name`: how the user calls it. `num_heads` > 0 trains Medusa heads
    instead of a draft, `published` with output layers of their own. `num_layers`: how many of the
    target's, where the recipe names none (0: a sixth). `asset`: where the small form goes, too.
    `init`: the folder of a draft to go on from, in its shape, and with its own vocabulary unless
    `own_vocab` is False.
    """

    target: Path
    name: str
    out: Path
    work: Path
    data: DataSettings
    recipe: Recipe
    budget: Budget
    num_layers: int = 0
    num_heads: int = 0
    published: bool = False
    asset: Path | None = None
    init: Path | None = None
    own_vocab: bool = True
    device: str = "cpu"
    num_threads: int = 1
    command: str = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how it goes, and who may stop the training between two steps."""

    progress: Progress = no_progress
    step: Callable[[StepReport], None] = no_report
    should_stop: Callable[[], bool] = field(default=lambda: False)


def distill(job: DistillJob, watch: Watch) -> dict[str, Any] | None:
    """The report, which is also in the result's folder; None when it was stopped before its end.

    `ConfigError` for everything that the user can mend: bad input, a full disk, another job's
    work folder.
    """
    with in_sentences():
        use_device(job.device, job.num_threads)
        is_made_up = job.data.chats is None and job.data.num_chats > 0
        check_target(job.target, job.data.length if is_made_up or job.data.texts else 0)
        recipe = _complete_recipe(job)
        _check_places(job)
        _claim_work(job)
        data = gather(job.target, job.data, job.work, job.device, watch.progress)
        ancestry = _ancestry(job, data)
        if note := ancestry.get("held_out_note"):
            watch.progress(note, 0, 0)
        recipe = replace(
            recipe, skip=max(data.prefix - 1, 0), held_out=len(data.held_out), seed=job.data.seed
        )
        prepare(job.target, data.train, job.work, job.device, watch.progress)
        part = _part(job)
        remember({**asdict(recipe), "num_heads": job.num_heads}, part, _SETTINGS)
        vocab = _train(job, recipe, data, part, watch)
        if vocab is None:
            return None
        retract_report(job.out)
        _write_result(job, recipe, part, vocab)
        return _report(job, recipe, data, part, watch, ancestry)


def _part(job: DistillJob) -> Path:
    return job.work / ("medusa" if job.num_heads else "draft")


@contextmanager
def in_sentences() -> Iterator[None]:
    """What a disk may do to us becomes a `ConfigError`."""
    try:
        yield
    except OSError as error:
        name, reason = error.filename or "a file", error.strerror or error
        raise ConfigError(f"cannot read or write {name}: {reason}") from error
    except SafetensorError as error:
        raise ConfigError(f"a weights file cannot be read or written: {error}") from error


def _complete_recipe(job: DistillJob) -> Recipe:
    """With layers, if none are named; checked before hours of work begin."""
    config = AutoConfig.from_pretrained(job.target, local_files_only=True).to_dict()
    if job.num_heads:
        return replace(job.recipe, layers=(), student_config={})
    recipe = job.recipe
    if job.init is not None:
        recipe = complete_recipe(recipe, config, job.init, own_vocab=job.own_vocab)
        if not (_part(job) / _SETTINGS).exists():  # else they name a draft that was checked
            check_init(job.init, job.target, recipe)
        return recipe
    if not recipe.layers and not recipe.student_config:
        total = config["num_hidden_layers"]
        layers = spread_layers(total, job.num_layers or max(1, round(total / 6)))
        recipe = replace(recipe, layers=layers)
    draft_config(config, recipe)
    return recipe


def _check_places(job: DistillJob) -> None:
    places = {"--out": job.out, "--work": job.work}
    places |= {"--asset": job.asset} if job.asset else {}
    check_apart(job.target, places)
    if job.init is not None:
        check_apart(job.init, places, whose="--init's")
    claim_result(job.out)


def _claim_work(job: DistillJob) -> None:
    """With rejections it is for its owner only: its states are as good as their text."""
    if job.data.rejections:
        job.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        if job.work.stat().st_uid != os.geteuid():
            raise ConfigError(
                f"{job.work} belongs to another user, who could read the rejections' texts: "
                "name another --work folder"
            )
    remember(_data_settings(job), job.work, "data.json")
    if job.data.rejections:
        job.work.chmod(0o700)  # one that was begun before, too


def _data_settings(job: DistillJob) -> dict[str, Any]:
    """Files are looked at before they are read for their hashes; logs of rejections grow on."""
    files = [(job.data.chats, MAX_CHATS_BYTES)] if job.data.chats else []
    files += [(path, MAX_TEXT_BYTES) for path in job.data.texts]
    for path, limit in files:
        check_file(path, limit)
    hashes = [sha256_of(path) for path, _ in files]
    settings = asdict(job.data)
    if not job.data.rejections:
        del settings["rejections"]  # as folders have it that were begun before there were any
    return {**settings, "target": fingerprint(job.target), "files": hashes}


# ------------------------------------------------------------------------------------- training


def _train(
    job: DistillJob, recipe: Recipe, data: Data, part: Path, watch: Watch
) -> torch.Tensor | None:
    """The draft's vocabulary; None when it was stopped."""
    torch.manual_seed(recipe.seed)
    examples = load_examples(data, job.work, recipe.skip, job.num_heads)
    if not examples:
        raise ConfigError(f"no chat is longer than what all begin with ({recipe.skip} tokens)")
    target = load_target(job.target, torch.float32, job.device)
    head = target.get_output_embeddings().weight.detach()
    vocab = _vocab(job, head, examples, recipe, part)
    loss = Loss(head[vocab.to(head.device)], recipe)
    objective: Objective
    fit: Callable[[], None]
    few = examples[:FIT_CHATS]
    if job.num_heads:
        heads = HeadsObjective(job.num_heads, head.shape[1], loss, recipe).to(head.device)
        objective, fit = heads, partial(heads.fit_maps, few)
    else:
        student = Student(target, recipe)
        objective = DraftObjective(student, loss, recipe)
        fit = partial(fit_head_map, student, few, recipe.skip)
        if job.init is not None:
            embeddings = target.get_input_embeddings().weight.detach()
            fit = partial(start_from, student, job.init, embeddings, head)
    if not (part / CHECKPOINT).exists():
        fit()
    trainer = Trainer(objective, recipe, part)  # whose average begins with what was fitted
    trainer.resume()
    del target, head, fit  # the student keeps the embeddings, the loss its rows
    is_done = train(trainer, examples, recipe, job.budget, watch.step, watch.should_stop)
    return vocab if is_done else None


def _vocab(
    job: DistillJob, head: torch.Tensor, examples: list[Example], recipe: Recipe, part: Path
) -> torch.Tensor:
    """Chosen once a work folder."""
    path = part / _VOCAB
    if not path.exists():
        ids = read_draft_vocab(job.init) if job.init is not None and job.own_vocab else None
        vocab = choose_vocab(head, examples, recipe) if ids is None else torch.tensor(ids)
        save_whole({"draft_vocab": vocab.int()}, path)
    return load_whole(path, ("draft_vocab",))["draft_vocab"].long()


# --------------------------------------------------------------------------------------- result


def _write_result(job: DistillJob, recipe: Recipe, part: Path, vocab: torch.Tensor) -> None:
    config = AutoConfig.from_pretrained(job.target, local_files_only=True).to_dict()
    if job.num_heads:
        head = None
        if job.published:
            head = load_target(job.target, "auto").get_output_embeddings().weight.detach()
        write_heads(part, vocab, job.name, job.out, output=head)
        return
    changes = draft_config(config, recipe)
    tensors = draft_tensors(part, vocab, config["vocab_size"])
    if job.asset is None:
        write_draft(job.target, tensors, changes, job.out)
        return
    description = {
        "target": job.name,
        "num_hidden_layers": changes["num_hidden_layers"],
        "config": changes,
        "recipe": asdict(recipe),
        "progress": asdict(read_progress(part)),
    }
    write_asset(tensors, description, job.asset)
    compose_draft(job.target, job.asset, job.out)  # so that the figures are the asset's


def _ancestry(job: DistillJob, data: Data) -> dict[str, Any]:
    """What a report says of the runs before this one."""
    if job.init is None:
        return {}
    earlier = earlier_runs(job.init)
    note = held_out_note(earlier, job.data.seed, data.description)
    known = {} if earlier is None else {"earlier": earlier}
    return known | ({"held_out_note": note} if note else {})


def _report(
    job: DistillJob,
    recipe: Recipe,
    data: Data,
    part: Path,
    watch: Watch,
    ancestry: Mapping[str, Any],
) -> dict[str, Any]:
    made = {
        "data": data.description,
        "recipe": _plain(asdict(recipe)),
        "progress": asdict(read_progress(part)),
        "budget": asdict(job.budget),
        "machine": machine(job.device, job.num_threads),
        "command": job.command,
        **ancestry,
    }
    chats, last = _held_out_file(job, data.held_out), len(data.held_out)
    which = f"--medusa-heads {job.out}" if job.num_heads else f"--draft {job.out}"
    again = f"paceline distill {job.name} --report-only {which} --chats {chats} --last {last}"
    again += f" --threads {job.num_threads}" if job.num_threads != 1 else ""
    measure = report_heads if job.num_heads else report_draft
    figures = measure(
        job.target, job.out, data.held_out, job.device, job.num_threads, watch.progress
    )
    names = {"name": job.out.resolve().name, "target": job.name, "measure_command": again}
    report = {**figures, **names, "made": made}
    write_report(report, job.out)
    return report


def _held_out_file(job: DistillJob, held_out: list[Chat]) -> Path:
    """Beside the result when the target made them up: the user's own texts are not copied."""
    if job.data.chats is not None or job.data.texts:
        return job.data.chats or Path("FILE")
    write_chats(held_out, job.out / HELD_OUT)
    return job.out / HELD_OUT


def _plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(recipe))
    return plain
