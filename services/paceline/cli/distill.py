"""`paceline distill`: a draft, or Medusa heads, for any target from the target's own outputs.

Turns the command line into a job of the engine's and shows how it goes; knows nothing of tensors.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline import models
from paceline.cli import distill_options as options
from paceline.cli.console import err, out
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine.distill_run import DistillJob

MAX_STUDENT_BYTES = 1 << 16
EXCLUSIVE = (
    ("chats", "num_chats"),
    ("layers", "num_layers", "student_config", "init", "medusa"),
    ("steps", "minutes"),
    ("asset", "medusa"),
)
MEASURING_ONLY = ("draft", "medusa_heads", "last")
TRAINING_ONLY = (
    *("work", "num_chats", "text", "rejections", "length", "held_out", "layers", "num_layers"),
    *("student_config", "init", "vocab", "medusa", "published", "asset", "steps", "minutes"),
    *("seed", "rate"),
)


def distill(
    target: options.Target,
    to: options.Out = None,
    work: options.Work = None,
    chats: options.Chats = None,
    num_chats: options.NumChats = None,
    text: options.Text = None,
    rejections: options.Rejections = None,
    length: options.Length = 320,
    held_out: options.HeldOut = None,
    layers: options.Layers = None,
    num_layers: options.NumLayers = None,
    student_config: options.StudentConfig = None,
    init: options.Init = None,
    vocab: options.Vocab = None,
    medusa: options.Medusa = 0,
    published: options.Published = False,
    asset: options.Asset = None,
    steps: options.Steps = None,
    minutes: options.Minutes = None,
    seed: options.Seed = 0,
    rate: options.Rate = 1e-3,
    device: options.Device = "cpu",
    threads: options.Threads = 1,
    report_only: options.ReportOnly = False,
    draft: options.Draft = None,
    medusa_heads: options.MedusaHeads = None,
    last: options.Last = 64,
) -> None:
    """Train a small draft, or Medusa heads, for a target on the target's own outputs.

    Stop it with Ctrl-C and start it again: it goes on. With --steps, the same command gives the
    same weights on the same machine; with --minutes the number of steps depends on the clock.

    \b
    Examples:
      paceline distill smollm2-135m --out my-draft --minutes 60
      paceline distill smollm2-135m --out better --init my-draft --seed 1
      paceline distill smollm2-135m --out my-heads --medusa 3 --work my-draft-work
      paceline distill smollm2-135m --out my-draft --rejections ~/rejections
      paceline distill smollm2-135m --report-only --draft my-draft --chats my-draft/held_out.jsonl
    """
    given = dict(locals())
    _check_used(given)
    if report_only:
        _measure(given)
        return
    if to is None:
        raise typer.BadParameter("--out names the folder of the result")
    _check_pairs(given)
    job = _job(given)
    from paceline.cli.distill_view import training_display
    from paceline.engine.distill_run import distill as run

    with training_display() as watch:
        report = run(job, watch)
    if report is None:
        err.print("stopped; the same command goes on from here", markup=False)
        raise KeyboardInterrupt
    _show(report)
    if note := report["made"].get("held_out_note"):
        err.print(f"warning: {note}", markup=False)
    out.print(str(job.out), markup=False)


def _check_used(given: dict[str, Any]) -> None:
    """Nothing that was asked for is ignored."""
    what, where = (TRAINING_ONLY, "without") if given["report_only"] else (MEASURING_ONLY, "with")
    parameters = inspect.signature(distill).parameters
    for name in what:
        if given[name] != parameters[name].default:
            raise typer.BadParameter(f"--{name.replace('_', '-')} goes {where} --report-only")


def _check_pairs(given: dict[str, Any]) -> None:
    for names in EXCLUSIVE:
        found = [f"--{name.replace('_', '-')}" for name in names if given[name] not in (None, 0)]
        if len(found) > 1:
            raise typer.BadParameter(f"{found[0]} and {found[1]} exclude each other")
    if given["published"] and not given["medusa"]:
        raise typer.BadParameter("--published goes with --medusa")
    if given["published"] and given["vocab"]:
        raise typer.BadParameter("--published heads have the whole vocabulary: leave --vocab away")
    if given["minutes"] is not None and given["minutes"] <= 0:
        raise typer.BadParameter("--minutes must be above 0")
    if given["num_chats"] == 0 and not given["text"]:
        raise typer.BadParameter("--num-chats 0 needs --text files to learn from")


def _job(given: dict[str, Any]) -> DistillJob:
    shape = _student_config(given["student_config"])
    layers = _layers(given["layers"])
    _check_device(given["device"])
    folder = models.resolve(given["target"])
    from paceline.engine.distill import Budget
    from paceline.engine.distill_data import DataSettings
    from paceline.engine.distill_init import find_draft
    from paceline.engine.distill_run import DistillJob
    from paceline.engine.student import Recipe

    chats, num_chats = given["chats"], given["num_chats"]
    vocab = options.DEFAULT_VOCAB if given["vocab"] is None else given["vocab"]
    minutes = options.DEFAULT_MINUTES if given["minutes"] is None else given["minutes"]
    init = None if given["init"] is None else find_draft(given["init"])
    steps, rate = given["steps"] or 0, given["rate"]
    to = given["to"]
    return DistillJob(
        target=folder,
        name=given["target"],
        out=to,
        work=given["work"] or work_folder(to),
        data=DataSettings(
            chats=chats,
            num_chats=0 if chats else options.DEFAULT_NUM_CHATS if num_chats is None else num_chats,
            texts=tuple(given["text"] or ()),
            length=given["length"],
            held_out=given["held_out"] or 0,
            seed=given["seed"],
            rejections=tuple(given["rejections"] or ()),
        ),
        recipe=Recipe(
            layers=layers,
            vocab=0 if given["published"] else vocab,
            rate=rate,
            map_rate=2 * rate,
            student_config=shape,
        ),
        budget=Budget(steps=steps, seconds=0.0 if steps else 60.0 * minutes),
        num_layers=given["num_layers"] or 0,
        num_heads=given["medusa"],
        published=given["published"],
        asset=given["asset"],
        init=init,
        own_vocab=given["vocab"] is None,
        device=given["device"],
        num_threads=given["threads"],
        command=_command(),
    )


def work_folder(to: Path) -> Path:
    """Beside the result, also where it is "." or ".."."""
    if to.name in ("", ".."):
        to = to.resolve()
    return to.parent / f"{to.name}-work"


def _command() -> str:
    """As it was typed, for the card."""
    arguments = sys.argv[1:] if sys.argv[1:2] == ["distill"] else ["distill", "..."]
    return shlex.join(["paceline", *arguments])


def _layers(text: str | None) -> tuple[int, ...]:
    parts = (text or "").replace(",", " ").split()
    is_empty = text is not None and not parts
    if is_empty or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--layers {text!r} are no layer numbers such as 0,1,16,17,18")
    return tuple(int(part) for part in parts)


def _student_config(path: Path | None) -> dict[str, int]:
    if path is None:
        return {}
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not an ordinary file")
        if path.stat().st_size > MAX_STUDENT_BYTES:
            raise ConfigError(f"{path} is too large to be a student's config")
        shape = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(shape, dict) or not shape:
        raise ConfigError(f"{path} is not a JSON object such as {{'hidden_size': 192}}")
    return shape


def _check_device(device: str) -> None:
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device!r} is neither cpu nor cuda")


# ------------------------------------------------------------------------------------ the report


def _measure(given: dict[str, Any]) -> None:
    draft, heads = given["draft"], given["medusa_heads"]
    if (draft is None) == (heads is None) or given["chats"] is None:
        raise typer.BadParameter(
            "--report-only needs --chats and one of --draft and --medusa-heads"
        )
    _check_device(given["device"])
    target = models.resolve(given["target"])
    folder = models.resolve(draft) if draft else None
    from paceline.cli.distill_view import training_display
    from paceline.engine.distill_folders import claim_report
    from paceline.engine.distill_report import MeasureJob, measure, write_report
    from paceline.engine.distill_run import in_sentences

    job = MeasureJob(
        target=target,
        name=given["target"],
        chats=given["chats"],
        last=given["last"],
        draft=folder,
        heads=heads,
        device=given["device"],
        num_threads=given["threads"],
        command=_command(),
    )
    to, made = given["to"], {}
    with in_sentences():
        if to is not None:
            made = claim_report(to, target, folder or heads)
        with training_display() as watch:
            report = measure(job, watch.progress)
        if to is not None:
            write_report({**report, **made}, to)
    _show(report)


def _show(report: dict[str, Any]) -> None:
    """The card's table: Markdown is text, too."""
    from paceline.engine.draft_card import table

    for line in table(report):
        out.print(line, markup=False)
