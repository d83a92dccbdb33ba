"""The policies of `deploy/kuberay`, evaluated: who may connect to whom, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "kuberay" / "networkpolicy.yaml"
RAY = {"ray.io/cluster": "paceline"}
OTHER_RAY = {"ray.io/cluster": "other"}
BALANCER = {"paceline.io/http-client": "true"}
DNS = {"k8s-app": "kube-dns"}
HERE, SYSTEM = (
    {"kubernetes.io/metadata.name": "serving"},
    {"kubernetes.io/metadata.name": "kube-system"},
)
Pod = tuple[dict[str, str], dict[str, str]]  # (its labels, its namespace's labels)


def policies() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())


def is_peer(peer: dict[str, Any], pod: Pod) -> bool:
    labels, namespace = pod
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in peer:
        is_there = matches(peer["namespaceSelector"], namespace)
    else:
        is_there = namespace == HERE
    return is_there and matches(peer.get("podSelector", {}), labels)


def allows(direction: str, ours: Pod, theirs: Pod, protocol: str, port: int) -> bool:
    """As Kubernetes: a pod that policies of this direction select may do what any of them lists."""
    selecting = [
        policy["spec"]
        for policy in policies()
        if ours[1] == HERE
        and matches(policy["spec"]["podSelector"], ours[0])
        and direction in policy["spec"]["policyTypes"]
    ]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    side = "from" if direction == "Ingress" else "to"
    return any(
        any(is_peer(peer, theirs) for peer in rule[side])
        and ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
        for rule in rules
    )


def connects(source: Pod, sink: Pod, port: int, protocol: str = "TCP") -> bool:
    return allows("Egress", source, sink, protocol, port) and allows(
        "Ingress", sink, source, protocol, port
    )


def test_they_are_network_policies() -> None:
    assert [(one["apiVersion"], one["kind"]) for one in policies()] == [
        ("networking.k8s.io/v1", "NetworkPolicy")
    ] * 3
    assert len({one["metadata"]["name"] for one in policies()}) == 3


@pytest.mark.parametrize("port", [6379, 8000, 10001, 52000, 61234])
def test_the_pods_of_the_cluster_reach_each_other(port: int) -> None:
    assert connects((RAY, HERE), (RAY, HERE), port)


@pytest.mark.parametrize("who", [({}, HERE), (OTHER_RAY, HERE), (RAY, SYSTEM), ({}, SYSTEM)])
@pytest.mark.parametrize("port", [6379, 8000, 8265, 10001, 52000])
def test_a_stranger_reaches_nothing_and_is_not_reached(who: Pod, port: int) -> None:
    assert not connects(who, (RAY, HERE), port)
    assert not connects((RAY, HERE), who, port)


def test_a_load_balancer_reaches_http_alone() -> None:
    for namespace in (HERE, SYSTEM):
        assert connects((BALANCER, namespace), (RAY, HERE), 8000)
        for port in (6379, 8265, 10001, 52000):
            assert not connects((BALANCER, namespace), (RAY, HERE), port)


def test_names_can_be_looked_up() -> None:
    assert connects((RAY, HERE), (DNS, SYSTEM), 53, "UDP")
    assert connects((RAY, HERE), (DNS, SYSTEM), 53, "TCP")
    assert not connects((RAY, HERE), (DNS, SYSTEM), 443)
