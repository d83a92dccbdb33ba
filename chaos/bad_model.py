"""Scenario: model folders that must not be served. Each start is refused with a sentence.

`paceline serve` is run as a user would run it, beside the running service. Nothing of the folder
may be unpickled: the pickle here would leave a file behind.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

import yaml

from chaos import run
from chaos.cluster import HERE, Cluster
from chaos.run import Result
from chaos.scenarios import Scenario

TIMEOUT_S = 180.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
# GLOBAL posix.system: unpickling it runs `touch` on the file named here.
PICKLE = "cposix\nsystem\n(S'touch {path}'\ntR."


async def bad_model(
    cluster: Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> Result:
    """Missing, corrupt and pickled; one start each."""
    result = Result(scenario.name, seed, scenario.promise, round_s=reference.round_s)
    rng = random.Random(f"{scenario.name}/{seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        canary = folder / "unpickled"
        for kind, source in _folders(folder, canary, rng).items():
            code, said = await _start(folder, source)
            result.faults_fired += 1
            sentence = said.strip().splitlines()[-1] if said.strip() else ""
            result.figures[kind] = f"exit {code}: {sentence[:160]}"
            if code == 0 or "Traceback" in said or not sentence:
                result.violations.append(f"{kind}: exit {code}, {said[-200:]!r}")
        if canary.exists():
            result.violations.append("a pickle was executed")
    await run.settle(cluster, result)
    return result


def _folders(folder: Path, canary: Path, rng: random.Random) -> dict[str, Path]:
    made = {kind: folder / kind for kind in ("missing", "corrupt", "pickle")}
    for kind in ("corrupt", "pickle"):
        made[kind].mkdir()
        (made[kind] / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (made["corrupt"] / "model.safetensors").write_bytes(rng.randbytes(4096))
    pickled = PICKLE.format(path=canary).encode()
    (made["pickle"] / "pytorch_model.bin").write_bytes(pickled)
    return made


async def _start(folder: Path, source: Path) -> tuple[int, str]:
    """(exit code, what it said) of `paceline serve` with this model."""
    data = yaml.safe_load((HERE / "serve.yaml").read_text(encoding="utf-8"))
    app = data["applications"][0]
    app["import_path"] = "paceline.app:build_app"
    app["args"]["target"]["model"] = {"source": str(source)}
    app["args"]["speculation"] = {"method": "off"}
    app["deployments"] = [d for d in app["deployments"] if d["name"] != "DraftReplica"]
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "paceline.cli.main", "serve", str(path), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.terminate()
        said, _ = await process.communicate()
        return 0, "still running: " + said.decode(errors="replace")
    return process.returncode or 0, said.decode(errors="replace")
