# SPDX-License-Identifier: Apache-2.0
"""The manifests for Kubernetes have no field that their kinds do not have, and none of another type.

Of the schemas only the fields that are used: PyTorchJob of kubeflow.org/v1 (training-operator 1.7 to 1.9), Job of
batch/v1 and Service of v1 (Kubernetes 1.24 or later).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[4] / "examples" / "launch" / "kubernetes"
LABELS = {"*": str}
METADATA = {"name": str, "labels": LABELS}
SELECTOR = {"matchLabels": LABELS}
CONTAINER = {
    "name": str, "image": str, "workingDir": str, "command": [str], "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
    "resources": {"limits": {"*": (int, str)}},
    "ports": [{"name": str, "containerPort": int}],
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}  # fmt: skip
VOLUME = {
    "name": str,
    "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
    "emptyDir": {"medium": str, "sizeLimit": str},
}
POD = {
    "metadata": {"labels": LABELS},
    "spec": {
        "subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
        "volumes": [VOLUME],
        "topologySpreadConstraints": [
            {"maxSkew": int, "topologyKey": str, "whenUnsatisfiable": str, "labelSelector": SELECTOR}
        ],
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": int, "podAffinityTerm": {"topologyKey": str, "labelSelector": SELECTOR}}
        ]}},
    },
}  # fmt: skip
REPLICAS = {"replicas": int, "restartPolicy": str, "template": POD}
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str, "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
    },
    ("batch/v1", "Job"): {
        "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int, "template": POD,
    },
    ("v1", "Service"): {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": LABELS, "ports": [
        {"name": str, "port": int}
    ]},
}  # fmt: skip
"""(apiVersion, kind) -> fields of its spec; "*": any name."""


def list_problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    """What does not fit: a field with its place, and what was expected of it."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{place}: expected fields"
            return
        for name, content in value.items():
            if name in schema or "*" in schema:
                yield from list_problems(content, schema.get(name, schema.get("*")), f"{place}.{name}")
            else:
                yield f"{place}.{name}: there is no such field"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{place}: expected a list"
            return
        for number, content in enumerate(value):
            yield from list_problems(content, schema[0], f"{place}[{number}]")
    # True is an int to Python, and not to Kubernetes.
    elif not isinstance(value, schema) or (isinstance(value, bool) and schema is not bool):
        yield f"{place}: expected {schema}, found {value!r}"


def check(manifest: dict[str, Any]) -> list[str]:
    schema = SCHEMAS[manifest["apiVersion"], manifest["kind"]]
    whole = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": schema}
    return list(list_problems(manifest, whole, manifest["kind"]))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: str(file.name))
def test_every_field_is_one_of_its_kind(file: Path) -> None:
    manifests = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    assert manifests and [problem for manifest in manifests for problem in check(manifest)] == []


def test_mistakes_are_seen() -> None:
    manifest = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"},
        "spec": {"completion": 2, "parallelism": "2", "backoffLimit": True, "template": {"spec": {"containers": {}}}},
    }  # fmt: skip
    assert [problem.partition(":")[0] for problem in check(manifest)] == [
        "Job.spec.completion", "Job.spec.parallelism", "Job.spec.backoffLimit", "Job.spec.template.spec.containers",
    ]  # fmt: skip
