"""Write kubernetes_schemas.json: the schemas that the manifests of ``echelon submit kubernetes`` are validated by.

    pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0    # in an environment of its own
    python tests/data/make_cluster_schemas.py

Both are under the Apache License 2.0: Kubernetes' own OpenAPI document as JSON schema (which forbids unknown fields), and the
models that Kubeflow makes from the Go types of its TrainJob. Descriptions are left out, and what no object here refers to.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "kubernetes_schemas.json"
KINDS = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "Secret": "io.k8s.api.core.v1.Secret",
}


def _kubernetes() -> dict[str, Any]:
    package = distribution("kubernetes-validate")
    place = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
    found = json.loads(Path(str(package.locate_file(place))).read_text(encoding="utf-8"))
    return _needed(found["$defs"], KINDS.values())


def _kubeflow() -> dict[str, Any]:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    made = TrainerV1alpha1TrainJob.model_json_schema(by_alias=True)
    every = {**made.pop("$defs"), "TrainJob": made}
    for name, schema in every.items():
        # One of several types (a quantity is a text or a number): the generator's class has a field for each.
        kinds = [inner for field, inner in schema.get("properties", {}).items() if field.startswith("oneof_schema_")]
        if kinds:
            every[name] = {"anyOf": kinds}
        elif "properties" in schema:
            schema["additionalProperties"] = False
            # Optional[X]: absent, never null; and an error is told where it is.
            for field, inner in schema["properties"].items():
                kinds = [kind for kind in inner.get("anyOf", ()) if kind != {"type": "null"}]
                schema["properties"][field] = kinds[0] if len(kinds) == 1 else inner
    return _needed(every, ["TrainJob"])


def _needed(every: dict[str, Any], names: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _shortened(every[name])
            left += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(found[name]))
    return {name: found[name] for name in sorted(found)}


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _shortened(inner)
            for name, inner in value.items()
            # A property may be called description, and is no text then.
            if not (name in ("description", "title") and isinstance(inner, str)) and not name.startswith("x-kubernetes")
        }
    return [_shortened(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    """Write the file."""
    about = {
        "sources": {name: version(name) for name in ("kubernetes-validate", "kubeflow-trainer-api")},
        "licence": "Apache-2.0 (The Kubernetes Authors; The Kubeflow Authors)",
        "made by": "tests/data/make_cluster_schemas.py",
        "kinds": {**KINDS, "TrainJob": "TrainJob"},
    }
    lines = [f'"{name}": {json.dumps(schema)}' for name, schema in {**_kubernetes(), **_kubeflow()}.items()]
    body = ",\n".join(lines)
    PLACE.write_text(f'{{"about": {json.dumps(about)},\n"$defs": {{\n{body}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
