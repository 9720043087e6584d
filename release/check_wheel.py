"""Checks the contents of a wheel: its version, the command, the module with its types and bill of materials, the license, and
the versions of glibc that the platform tag promises. usage: check_wheel.py WHEEL VERSION"""

import json
import re
import sys
import zipfile


def newest_glibc(content):
    """The newest symbol version of glibc that an ELF file names."""
    found = {tuple(map(int, match.split(b"."))) for match in re.findall(rb"GLIBC_(\d+\.\d+)", content)}
    return max(found, default=(0, 0))


def main(path, version):
    wheel = zipfile.ZipFile(path)
    assert wheel.testzip() is None
    names = wheel.namelist()
    metadata = wheel.read(f"pointsman-{version}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata, metadata
    command = f"pointsman-{version}.data/scripts/pointsman"
    information = f"pointsman-{version}.dist-info"
    bill, text = f"{information}/sboms/pointsman-python.cyclonedx.json", f"{information}/licenses/LICENSE"
    for name in (command, "pointsman/_native.abi3.so", "pointsman/_native.pyi", "pointsman/py.typed", bill, text):
        assert name in names, f"{name} is not in {names}"
    print(f"module: {len(json.loads(wheel.read(bill))['components'])} components in its bill of materials")
    assert not any(name.startswith(("tests", "examples")) for name in names), names
    tag = re.search(r"manylinux_(\d+)_(\d+)", path)
    assert tag, f"{path} has no manylinux tag"
    for name in (command, "pointsman/_native.abi3.so"):
        needed = newest_glibc(wheel.read(name))
        print(f"{name}: {wheel.getinfo(name).file_size} bytes, glibc {needed[0]}.{needed[1]}")
        assert needed <= (int(tag[1]), int(tag[2])), f"{name} needs glibc {needed}"


main(*sys.argv[1:])
