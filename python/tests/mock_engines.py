"""Mock engines and free ports."""

import contextlib
import os
import re
import socket
import subprocess

#: Beginning of a program whose routers wait at most one second for their workers.
IMPATIENT = "from pointsman import Router; Router.start.__defaults__ = (1.0,)"

BINARY = os.environ["POINTSMAN"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def engines(count, *options):
    """Starts mock engines, and returns their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for seed in range(count):
            command = [BINARY, "mock-engine", "--port", "0", "--model", "mock", "--time-scale", "0", "--seed", str(seed)]
            process = stack.enter_context(subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            urls.append(re.search("http://.*", process.stdout.readline()).group())
        yield urls
