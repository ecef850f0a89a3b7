"""As much of kustomize as deploy/kubernetes uses, for where no kubectl is: what a folder's kustomization makes."""

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
_KEYS = ("name", "mountPath", "containerPort")  # by which entries of a list are merged with a patch's


def built(folder: Path) -> list[Document]:
    """The documents that a kustomization makes, with namespace, labels, images and patches."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return _built(folder, said, [])


def overlay(folder: Path, resources: list[str], components: list[str]) -> list[Document]:
    """The documents that a kustomization in the folder makes of these resources and components."""
    return _built(folder, {"resources": resources, "components": components}, [])


def _built(folder: Path, said: Document, found: list[Document]) -> list[Document]:
    """What a kustomization makes of the documents that there are already: none, but for a component."""
    known = {"apiVersion", "kind", "resources", "components", "patches", "namespace", "labels", "images"}
    assert said.keys() <= known, f"{folder}: {said.keys() - known} is not known here"
    found = list(found)
    for name in said.get("resources", []):
        place = folder / name
        found += built(place) if place.is_dir() else yaml.safe_load_all(place.read_text())
    for name in said.get("components", []):
        place = folder / name
        found = _built(place, yaml.safe_load((place / "kustomization.yaml").read_text()), found)
    for patch in said.get("patches", []):
        if "target" in patch:
            _change(found, patch["target"], yaml.safe_load(patch["patch"]))
        else:
            found = _patched(found, yaml.safe_load((folder / patch["path"]).read_text()))
    for document in found:
        _finish(document, said)
    return found


def _change(documents: list[Document], target: Document, operations: list[Document]) -> None:
    """A JSON patch that adds, for each document whose kind and name fit the target's patterns."""
    for document in documents:
        if all(re.fullmatch(pattern, part) for pattern, part in zip(target.values(), _name(document), strict=True)):
            for operation in operations:
                assert operation["op"] == "add", f"{operation} is not known here"
                *way, last = operation["path"].strip("/").split("/")
                place: Any = document
                for step in way:
                    place = place[int(step)] if isinstance(place, list) else place[step]
                if isinstance(place, list):
                    assert last == "-", f"{operation} is not known here"
                    place.append(copy.deepcopy(operation["value"]))
                else:
                    place[last] = copy.deepcopy(operation["value"])


def _patched(documents: list[Document], patch: Document) -> list[Document]:
    (target,) = [each for each in documents if _name(each) == _name(patch)]
    if patch.get("$patch") == "delete":
        return [each for each in documents if each is not target]
    return [_merged(each, patch) if each is target else each for each in documents]


def _name(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _merged(value: Any, patch: Any) -> Any:
    """A strategic merge: mappings key by key, lists of named entries entry by entry, all else is replaced."""
    if isinstance(value, dict) and isinstance(patch, dict):
        return {name: _merged(value.get(name), patch.get(name, value.get(name))) for name in [*value, *patch]}
    if isinstance(value, list) and isinstance(patch, list) and (key := _key(value + patch)):
        rest = {entry[key]: entry for entry in value}
        fresh = [_merged(rest.pop(entry[key], None), entry) for entry in patch if entry.get("$patch") != "delete"]
        gone = {entry[key] for entry in patch if entry.get("$patch") == "delete"}
        return fresh + [entry for name, entry in rest.items() if name not in gone]
    return copy.deepcopy(patch)


def _key(entries: list[Any]) -> str | None:
    return next((key for key in _KEYS if all(isinstance(entry, dict) and key in entry for entry in entries)), None)


def _finish(document: Document, said: Document) -> None:
    if "namespace" in said:
        document["metadata"]["namespace"] = said["namespace"]
    for entry in said.get("labels", []):
        document["metadata"].setdefault("labels", {}).update(entry["pairs"])
    pod = document.get("spec", {}).get("template", {}).get("spec", {})
    images = {image["name"]: image for image in said.get("images", [])}
    for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
        if (image := images.get(container["image"])) is not None:
            container["image"] = f"{image['newName']}:{image['newTag']}"
