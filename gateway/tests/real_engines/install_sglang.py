"""Installs SGLang for CPUs into another environment, on top of the packages of this interpreter.

usage: install_sglang.py PYTHON, the interpreter of the other environment. SGLang's own requirements are builds for GPUs, so
it is installed without them, followed by the packages that its server imports on a CPU.
"""

import pathlib
import subprocess
import sys
import sysconfig

SGLANG = "sglang==0.5.23"
IMPORTED = (
    "pybase64 setproctitle orjson interegular uvloop python-multipart psutil partial_json_parser torch_memory_saver"
    " smg-grpc-servicer zstandard watchfiles xxhash gguf soundfile").split()

# Kernels for GPUs: a name is only an error when it is called.
STUB = '''"""Stand-in for SGLang's kernels, which no CPU runs."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments, **_named):
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    return missing
'''


def main(python):
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True).stdout.strip()
    site = pathlib.Path(site)
    (site / "vllm_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", SGLANG, *IMPORTED], check=True)
    subprocess.run([*pip, "ipython"], check=True)
    (site / "sgl_kernel").mkdir(exist_ok=True)
    (site / "sgl_kernel" / "__init__.py").write_text(STUB)
    subprocess.run([python, "-c", "import sglang; print('sglang', sglang.__version__)"], check=True)


main(sys.argv[1])
