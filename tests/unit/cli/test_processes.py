"""The tree below this process is seen whole and ended whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.cli import processes

# A child that starts a grandchild and waits for its standard input, which both share, to end.
TREE = """
import subprocess, sys
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "x"], stdout=subprocess.PIPE)
    child.stdout.readline()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path_factory.mktemp("tree") / "tree.py"
    script.write_text(TREE)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def family(tree: subprocess.Popen[str]) -> frozenset[processes.Process]:
    """The tree alone: other tests may have left something to this process."""
    found = processes.descendants()
    below = processes.descendants(tree.pid)
    assert below < found
    return below | {process for process in found if process.pid == tree.pid}


def test_descendants_are_children_and_their_children(tree: subprocess.Popen[str]) -> None:
    assert tree.pid in {process.pid for process in processes.descendants()}
    assert len(family(tree)) == 2
    assert len(processes.descendants(tree.pid)) == 1


def test_end_kills_what_does_not_end_by_itself(tree: subprocess.Popen[str]) -> None:
    found = family(tree)
    assert processes.still_alive(found) == found
    assert processes.end(found, grace_s=0.0) == found
    assert processes.still_alive(found) == frozenset()
    # The child is a zombie, which counts as ended.
    assert tree.pid not in {process.pid for process in processes.descendants()}


def test_end_waits_for_those_that_end_by_themselves(tree: subprocess.Popen[str]) -> None:
    found = family(tree)
    tree.communicate("")  # both read end of file and leave
    assert processes.end(found, grace_s=60.0) == frozenset()


def test_a_reused_pid_is_not_the_same_process(tree: subprocess.Popen[str]) -> None:
    impostor = frozenset({processes.Process(tree.pid, started=1)})
    assert processes.still_alive(impostor) == frozenset()
    assert processes.end(impostor, grace_s=0.0) == frozenset()
    assert tree.poll() is None
