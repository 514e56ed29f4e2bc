"""Makes the schemas in `tests/unit/env/schemas` from the resource definitions of Kubeflow Trainer and KubeRay.

    python -m tests.support.crd_schemas SOURCE DEFINITION.yaml VERSION OBJECTS.yaml > SCHEMA.json

A definition has about a million characters. Only the parts that the objects use are kept, and no descriptions. All names beside
them are kept too, so that an unknown name is found. SOURCE says where the definition comes from, with its licence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "anyOf")


def strict(schema: Mapping[str, Any], values: Iterable[Any]) -> dict[str, Any]:
    """Return the part of an OpenAPI schema that the values use, as a JSON Schema that refuses names which it does not have.

    Args:
        schema: of a Kubernetes resource definition.
        values: objects of this schema.
    """
    used = list(values)
    result = {name: schema[name] for name in _KEPT if name in schema}
    if "properties" in schema:
        found = {
            name: strict(inner, [value[name] for value in used if isinstance(value, dict) and name in value])
            if any(isinstance(value, dict) and name in value for value in used)
            else {}
            for name, inner in schema["properties"].items()
        }
        result |= {"properties": found, "additionalProperties": False}
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [each for value in used if isinstance(value, dict) for each in value.values()]
        result["additionalProperties"] = strict(schema["additionalProperties"], inner)
    if "items" in schema:
        result["items"] = strict(schema["items"], [each for value in used if isinstance(value, list) for each in value])
    return result


def main(source: str, definition: str, version: str, objects: str) -> None:
    """Print the schema."""
    resource = yaml.safe_load(Path(definition).read_text(encoding="utf-8"))["spec"]
    kind = resource["names"]["kind"]
    [found] = [each["schema"]["openAPIV3Schema"] for each in resource["versions"] if each["name"] == version]
    values = [each for each in yaml.safe_load_all(Path(objects).read_text(encoding="utf-8")) if each["kind"] == kind]
    schema = {"$comment": f"Made by tests/support/crd_schemas.py from {source}", "title": kind, **strict(found, values)}
    schema["properties"]["metadata"] = {"type": "object"}
    sys.stdout.write(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
