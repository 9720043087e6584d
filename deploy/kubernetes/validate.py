"""Validates rendered manifests: built-in kinds by kubernetes-validate, others by the schema of their CRD, and selectors.

usage: validate.py CRD_DIRECTORY MANIFEST...
"""
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.33"


def closed(schema):
    """The schema without unknown fields, as the API server prunes them."""
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) if isinstance(value, dict) else value for key, value in schema.items()}
    if "properties" in schema:
        schema["properties"] = {key: closed(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    return schema


def crd_schemas(directory):
    schemas = {}
    for path in pathlib.Path(directory).glob("*.yaml"):
        for crd in yaml.safe_load_all(path.read_text()):
            if not crd or crd.get("kind") != "CustomResourceDefinition":
                continue
            for version in crd["spec"]["versions"]:
                schema = closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                schemas[f'{crd["spec"]["group"]}/{version["name"]}', crd["spec"]["names"]["kind"]] = schema
    return schemas


def selected_pods(document):
    """Labels of the pods to which a document applies; None if its kind has no such labels."""
    spec = document.get("spec", {})
    if document["kind"] == "NetworkPolicy":
        return spec["podSelector"].get("matchLabels", {})
    if document["kind"] in ("PodDisruptionBudget", "Deployment"):
        return spec.get("selector", {}).get("matchLabels", {})
    return spec.get("selector", {}) if document["kind"] == "Service" else None


def selector_errors(documents):
    """Documents that select other pods than those of the Deployment. An empty selector selects all pods or none."""
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for document in documents:
        selected = selected_pods(document)
        if selected is not None and (not selected or not selected.items() <= labels.items()):
            yield f'{document["kind"]} {document["metadata"]["name"]} selects {selected}, must be labels of the Deployment'


def main(directory, manifests):
    schemas = crd_schemas(directory)
    failures = 0
    for manifest in manifests:
        counts = {"valid": 0, "skipped": 0}
        documents = list(yaml.safe_load_all(pathlib.Path(manifest).read_text()))
        for error in selector_errors(documents):
            print(f"error: {pathlib.Path(manifest).name}: {error}", file=sys.stderr)
            failures += 1
        for document in documents:
            version, kind = document["apiVersion"], document["kind"]
            name = f'{pathlib.Path(manifest).name}: {kind} {document["metadata"]["name"]}'
            is_builtin = "." not in version.split("/")[0] or version.split("/")[0].endswith(".k8s.io")
            try:
                if (version, kind) in schemas:
                    jsonschema.validate(document, schemas[version, kind])
                elif is_builtin and not version.startswith(("inference.", "gateway.")):
                    kubernetes_validate.validate(document, KUBERNETES, strict=True)
                else:
                    print(f"SKIPPED: {name}: no schema of {version}")
                    counts["skipped"] += 1
                    continue
                counts["valid"] += 1
            except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
                print(f"error: {name}: {error}", file=sys.stderr)
                failures += 1
        print(f'{pathlib.Path(manifest).name}: {counts["valid"]} valid, {counts["skipped"]} without a schema')
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
