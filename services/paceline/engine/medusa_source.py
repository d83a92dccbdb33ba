"""Where folders of Medusa heads come from: a local folder, a Hub id, or an alias of the demo's.

`models.resolve` for something that is no whole model. Loads no tensor and does not import torch;
whether the heads fit a target is found out when it loads them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.models import ASSETS, HUB_ID, Progress, no_progress, sha256_of

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEAD_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class MedusaAlias:
    """Heads that ship with the package, for the model that the alias `needs` names."""

    name: str
    description: str
    needs: str
    asset: str

    @property
    def folder(self) -> Path:
        return ASSETS / self.asset

    @property
    def is_here(self) -> bool:
        """A stripped package has no assets."""
        return (self.folder / HEAD_CONFIG).is_file()


MEDUSA_ALIASES = {
    alias.name: alias
    for alias in (
        MedusaAlias(
            "smollm2-135m-medusa",
            "Medusa heads for smollm2-135m; their card is in assets/smollm2-medusa",
            needs="smollm2-135m",
            asset="smollm2-medusa",
        ),
    )
}


def resolve_medusa(source: str) -> Path:
    """The folder of heads that `source` names; `ConfigError` with the fix if there is none."""
    if source in MEDUSA_ALIASES:
        alias = MEDUSA_ALIASES[source]
        if not alias.is_here:
            raise ConfigError(
                f"{source} is not part of this installation ({alias.folder} is missing): name a"
                " folder of heads"
            )
        return _checked(alias.folder)
    folder = Path(os.path.expanduser(source))  # os.path: never raises, whatever the string
    if os.path.isdir(folder):
        return _checked(folder)
    if os.path.exists(folder):
        raise ConfigError(f"target.medusa {source!r} is a file; name the folder that holds it")
    if HUB_ID.fullmatch(source):
        return _checked(_from_hub(source))
    raise ConfigError(
        f"target.medusa {source!r} is neither a folder here, nor a Hub id (org/name), nor one of"
        f" {', '.join(MEDUSA_ALIASES)}"
    )


def verify_medusa(name: str, progress: Progress = no_progress) -> Path:
    """`resolve_medusa` of an alias, with the checksum that its config states, if it does."""
    folder = resolve_medusa(name)
    try:
        config = json.loads((folder / HEAD_CONFIG).read_text(encoding="utf-8"))
        stated = config.get("weights_sha256")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder / HEAD_CONFIG} cannot be read ({error})") from error
    path = next(folder / file for file in HEAD_FILES if (folder / file).is_file())
    if stated is not None and sha256_of(path, progress, f"checking {name}") != stated:
        raise ConfigError(f"{path} does not match its checksum: install the package again")
    return folder


def _checked(folder: Path) -> Path:
    if not (folder / HEAD_CONFIG).is_file():
        raise ConfigError(f"{folder} has no {HEAD_CONFIG}: it is no folder of Medusa heads")
    if not any((folder / name).is_file() for name in HEAD_FILES):
        raise ConfigError(f"{folder} has neither {' nor '.join(HEAD_FILES)}: it holds no heads")
    return folder


def _from_hub(repo_id: str) -> Path:
    """From the Hub's local cache when it is complete there, else by downloading."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [HEAD_CONFIG, *HEAD_FILES]
    try:
        return _checked(
            Path(snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True))
        )
    except (LocalEntryNotFoundError, ConfigError):
        pass  # not cached, or only in part: the download below completes it
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"target.medusa {repo_id!r} is not in the local Hub cache and cannot be downloaded"
            f" ({reason}); check the name and the network, or name a local folder"
        ) from error
