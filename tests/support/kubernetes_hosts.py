"""The layouts of deploy/kubernetes, and what tests ask of them. Those of many hosts lie in hosts/."""

from functools import cache
from pathlib import Path
from typing import Any

from support.kustomize import built

Document = dict[str, Any]
KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
FOLDER = KUBERNETES / "hosts"
HUBS, FOLLOWERS = ("hub", "hub-postgres"), ("sidecar", "daemonset")
NAMES = (*HUBS, *FOLLOWERS)
ALONE = FLEET, SIDECAR = ("../fleet", "../sidecar")  # of one host
RELEASES = ("1.29", "1.33")  # native sidecars are on by default since 1.29
WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet")


@cache
def documents(name: str) -> list[Document]:
    return built(FOLDER / name)


def of_kind(name: str, *kinds: str) -> list[Document]:
    return [document for document in documents(name) if document["kind"] in kinds]


def pods(name: str) -> list[Document]:
    """The templates of the pods."""
    return [workload["spec"]["template"] for workload in of_kind(name, *WORKLOADS)]


def containers(name: str) -> list[tuple[Document, Document]]:
    """Each container with its pod's template."""
    found = [(pod, each) for pod in pods(name) for each in pod["spec"].get("initContainers", [])]
    return found + [(pod, each) for pod in pods(name) for each in pod["spec"]["containers"]]


def refitd(name: str) -> tuple[Document, Document]:
    ((pod, container),) = [each for each in containers(name) if each[1]["name"] == "refitd"]
    return pod, container


def settings_of(name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in refitd(name)[1]["env"] if "value" in each}


def tls_of(name: str) -> str:
    """The Secret with the certificate that refitd shows there."""
    (found,) = [each["secret"] for each in refitd(name)[0]["spec"]["volumes"] if each["name"] == "tls"]
    return found["secretName"]


def names_of(secret: str) -> list[str]:
    """The names in the certificate that cert-manager writes into a Secret."""
    certificates = {each["metadata"]["name"]: each["spec"] for each in built(FOLDER / "cert-manager")}
    return certificates[secret]["dnsNames"] + certificates[secret].get("ipAddresses", [])


def selects(labels: Document, selector: Document) -> bool:
    return selector.get("matchLabels", selector).items() <= labels.items()


def admitted(policy: Document, pod: Document, rules: str = "ingress") -> set[Any]:
    """The ports at which a policy lets a pod in, or out to it."""
    side = "from" if rules == "ingress" else "to"
    return {
        port["port"]
        for rule in policy["spec"].get(rules, [])
        for port in rule["ports"]
        if any("podSelector" in who and selects(pod["metadata"]["labels"], who["podSelector"]) for who in rule[side])
    }


def policy_of(name: str, pod: Document) -> Document:
    (found,) = [
        policy
        for policy in of_kind(name, "NetworkPolicy")
        if selects(pod["metadata"]["labels"], policy["spec"]["podSelector"])
    ]
    return found
