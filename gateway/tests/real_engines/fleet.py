"""Real vLLM and SGLang servers on CPUs with a random model, and the gateway in front of them, as child processes."""

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

BLOCK = 32  # tokens: attention on CPUs requires multiples of 32
BLOCKS = 400  # cache of each engine
DEVICE_BLOCKS_BESIDE_HOST = 140  # of an engine with BLOCKS in host memory
VOCABULARY = 4096
MODEL = "tiny"
ENGINES = 2
TOKEN = secrets.token_hex(32)  # admin API
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}

# Sizes of a model that computes prompts in almost no time.
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(directory, sizes=TINY):
    """Creates a random Qwen2 model and a tokenizer with one word per token."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "<end>"] + [f"w{n}" for n in range(VOCABULARY - 2)]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 1,
    } | sizes
    named = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"},
    }
    for name, content in named.items():
        (directory / name).write_text(json.dumps(content))


def make_adapters(directory):
    """Creates two random adapters (LoRA) of the small model. Returns their directories by name."""
    import numpy
    from safetensors.numpy import save_file

    rank, width = 8, TINY["hidden_size"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    adapters = {}
    for seed, name in enumerate(("first", "second")):
        dice = numpy.random.default_rng(seed)
        weights = {
            f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{side}.weight":
                dice.normal(size=(rank, width) if side == "A" else (width, rank)).astype("float32")
            for layer in range(TINY["num_hidden_layers"]) for target in config["target_modules"] for side in "AB"
        }
        adapters[name] = directory / f"adapter-{name}"
        adapters[name].mkdir(exist_ok=True)
        (adapters[name] / "adapter_config.json").write_text(json.dumps(config))
        save_file(weights, adapters[name] / "adapter_model.safetensors")
    return adapters


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Process:
    """Child process that ends with this program and writes its output to a file."""

    def __init__(self, arguments, log, environment=None):
        self.log = log
        with open(log, "wb") as output:
            self.child = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True, env=environment)

    def stop(self):
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGTERM)
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)

    def wait_for(self, port, path, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.child.poll() is not None:
                sys.exit(f"{self.log}: ended with {self.child.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        sys.exit(f"{self.log}: {path} did not answer 200 within {seconds} s")


def start_engine(directory, n, is_resettable=False, kv_role=None, adapters={}, flags={}, switches=()):
    """Starts a vLLM engine with these adapters, and these flags and switches beside its own. If resettable, POST /reset_prefix_cache
    clears its cache. With a role (`kv_producer` or `kv_consumer`) it transfers blocks by NIXL."""
    http_port, published, endpoints = ports()
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": str(int(is_resettable)),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    flags = {
        "--model": directory / "model",
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": http_port,
        "--load-format": "dummy",
        "--dtype": "float32",
        "--generation-config": "vllm",
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": BLOCKS,
        "--max-model-len": 4096,
        "--max-num-seqs": 16,
        "--kv-events-config": json.dumps({"enable_kv_cache_events": True} | published),
    } | flags
    if kv_role:
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        flags["--kv-transfer-config"] = json.dumps(transfer)
    named = [f"{name}={path}" for name, path in adapters.items()]
    lora = ["--enable-lora", "--max-loras", str(len(named)), "--max-lora-rank", "8", "--lora-modules", *named] if named else []
    switches = [*switches, *lora, "--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    arguments = ["vllm.entrypoints.openai.api_server", *words(flags), *switches]
    return started(arguments, directory / f"vllm-{n}.log", environment), http_port, endpoints


def offload_flags():
    """Flags of a vLLM engine with a small cache that offloads blocks to host memory, in the copies of `host_offload.py`."""
    block_bytes = 2 * TINY["num_hidden_layers"] * TINY["hidden_size"] * 4 * BLOCK
    settings = {"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offload", "cpu_bytes_to_use": BLOCKS * block_bytes}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return {"--num-gpu-blocks-override": DEVICE_BLOCKS_BESIDE_HOST, "--kv-transfer-config": json.dumps(transfer)}


def start_sglang(directory, n):
    """Starts an SGLang engine with as many blocks as one of vLLM. Adapters need a GPU."""
    http_port, published, endpoints = ports()
    flags = {
        "--model-path": directory / "model",
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": http_port,
        "--load-format": "dummy",
        "--device": "cpu",
        "--dtype": "float32",
        "--page-size": BLOCK,
        "--max-total-tokens": BLOCK * BLOCKS,
        "--attention-backend": "torch_native",
        "--kv-events-config": json.dumps(published),
    }
    # The text of the warm-up has no word of the model's vocabulary.
    switches = ["--disable-overlap-schedule", "--disable-cuda-graph", "--enable-metrics", "--enable-cache-report",
                "--skip-server-warmup"]
    arguments = ["sglang.launch_server", *words(flags), *switches]
    environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    return started(arguments, directory / f"sglang-{n}.log", environment), http_port, endpoints


def ports():
    """HTTP port of an engine, its settings for KV events, and their endpoints for the gateway."""
    http_port, events, replay = free_port(), free_port(), free_port()
    named = {"endpoint": events, "replay_endpoint": replay}
    published = {"publisher": "zmq", "topic": "kv-events"} | {name: f"tcp://*:{port}" for name, port in named.items()}
    return http_port, published, {name: f"tcp://127.0.0.1:{port}" for name, port in named.items()}


def words(flags):
    return [str(word) for flag in flags.items() for word in flag]


def started(arguments, log, environment):
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Process([sys.executable, "-m", *arguments], log, os.environ | common | environment)


def workers(engines):
    """Lines of the configuration with these workers."""
    lines = []
    for _, port, kv_events in engines:
        endpoints = ", ".join(f'{name} = "{endpoint}"' for name, endpoint in kv_events.items())
        lines += ["[[models.workers]]", "probe = true", f'url = "http://127.0.0.1:{port}"', f"kv_events = {{ {endpoints} }}"]
    return lines


def start_gateway(binary, directory, engines, policy=None, prefill_engines=(), audit_interval_ms=60_000, lines_of_model=()):
    listen, admin = free_port(), free_port()
    access, token = directory / "access.log", directory / "admin.token"
    access.unlink(missing_ok=True)
    token.write_text(TOKEN)
    token.chmod(0o600)
    lines = [
        "[gateway]",
        f'listen = "127.0.0.1:{listen}"',
        f'access_log = "{access}"',
        "[admin]",
        f'listen = "127.0.0.1:{admin}"',
        f'token_file = "{token}"',
        "[router]",
        f"block_size = {BLOCK}",
        *([f'policy = "{policy}"'] if policy else []),
        f"events.audit_interval_ms = {audit_interval_ms}",
        "[[models]]",
        f'name = "{MODEL}"',
        *lines_of_model,
    ]
    lines += workers(engines)
    if prefill_engines:
        lines += ["[models.disaggregation]", 'prefill = "prefill"', "[[models]]", 'name = "prefill"']
        lines += workers(prefill_engines)
    config = directory / "gateway.toml"
    config.write_text("\n".join(lines) + "\n")
    process = Process([binary, "serve", "--config", str(config)], directory / "gateway.log")
    return process, listen, admin, access


def call(port, path, body, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | (headers or {}))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        sys.exit(f"{path}: {answer.status} {content[:500]!r}")
    return json.loads(content)
