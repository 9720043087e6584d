"""Claude Code and Codex as child processes that know the gateway only."""

import base64
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time


def claude(agents, _, url, model, prompt):
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"]
    off = ["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER"]
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", **dict.fromkeys(models, model), **dict.fromkeys(off, "1")}
    return [agents / "claude", "-p", prompt, "--output-format", "json", "--allowedTools", "Bash(echo:*)"], variables


def codex(agents, home, url, model, prompt):
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(f"""
model = "{model}"
model_provider = "gateway"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
wire_api = "responses"
""")
    return [agents / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", prompt], {}


def codex_with_login(agents, home, url, model, prompt):
    """Codex compresses its requests by zstd with a login of ChatGPT: here an invented one."""
    command, variables = codex(agents, home, url, model, prompt)
    config = home / ".codex/config.toml"
    config.write_text(config.read_text().replace('name = "gateway"', 'name = "OpenAI"\nrequires_openai_auth = true'))
    account = {"chatgpt_plan_type": "plus", "chatgpt_account_id": "account", "chatgpt_user_id": "user"}
    claims = {"email": "a@localhost", "exp": 4102444800, "https://api.openai.com/auth": account}
    token = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in [{"alg": "none"}, claims, {}])
    tokens = {"id_token": token, "access_token": token, "refresh_token": "none", "account_id": "account"}
    last_refresh = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    login = {"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": last_refresh}
    (home / ".codex/auth.json").write_text(json.dumps(login))
    return command, variables


AGENTS = {"claude": claude, "codex": codex, "codex-zstd": codex_with_login}


def start(stack, command_of, agents, url, model, prompt, variables):
    """Starts an agent with a home of its own and without a way to other hosts. Returns the process and its home."""
    home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    (home / "work").mkdir()
    command, own = command_of(agents, home, url, model, prompt)
    proxies = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"], "http://127.0.0.1:9")
    direct = dict.fromkeys(["NO_PROXY", "no_proxy"], "127.0.0.1")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **proxies, **direct, **own, **variables}
    with open(home / "out", "w") as out, open(home / "err", "w") as err:
        process = subprocess.Popen(command, cwd=home / "work", env=environment, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    stack.callback(end, process)
    return process, home


def end(process):
    """Kills an agent with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def result_of(process, home, until):
    """Exit code and output of an agent, which has until then to end."""
    try:
        code = process.wait(max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        end(process)
        code = "timeout"
    return code, (home / "out").read_text(), (home / "err").read_text()
