"""Checks a bill of materials in CycloneDX: its version, and that it has all crates of `cargo tree`.

usage: check_bill.py VERSION TREE BILL. TREE has lines of the form `NAME vVERSION ...`. The bill may have more crates, because
its features are those of the whole workspace.
"""

import json
import pathlib
import re
import sys


def main(version, tree, path):
    bill = json.loads(pathlib.Path(path).read_text())
    described = bill["metadata"]["component"]
    assert (bill["bomFormat"], described["version"]) == ("CycloneDX", version), (bill["bomFormat"], described)
    listed = {(component["name"], component["version"]) for component in bill["components"]}
    crates = set(re.findall(r"^(\S+) v(\S+)", pathlib.Path(tree).read_text(), re.MULTILINE)) - {(described["name"], version)}
    assert len(crates) > 1 and crates <= listed, f"missing: {crates - listed}"
    print(f"{described['name']} {version}: {len(listed)} components, of which the binary has {len(crates)}")


main(*sys.argv[1:])
