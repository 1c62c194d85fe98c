# SPDX-License-Identifier: Apache-2.0
"""Answer over HTTP with a trained model: OpenAI's interface, and upstream's PUT /api.

    python -m megatron serve --load CHECKPOINTS --port 5000

http://localhost:5000/ is a page to try the model on. The server listens only on this machine unless --host says
otherwise. SIGTERM and Ctrl-C end it: what is being written may go on for --shutdown-timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.inference_flags import compare_with_checkpoint, read_upstream_flags, take_training_flags
from megatron.cli.trained import add_model_arguments, open_model, speaks
from megatron.core.errors import ConfigError, TemporaryError, command_line, say
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from megatron.core.device_graphs import Recorder
    from megatron.core.inference.engine import Engine
    from megatron.core.inference.named_adapters import NamedAdapters
    from megatron.core.inference.speculation import Drafter
    from megatron.serving.answers import ServedModel
    from megatron.training.checkpoint.trained_model import TrainedModel

_KEY_VARIABLE = "MEGATRON_API_KEY"
_UNKNOWN_LENGTH = 2048
"""Tokens of a text, where neither the model nor its training says how many."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = ProgramParser(__doc__, see="serve --help")
    add_model_arguments(parser)
    add = parser.add_argument_group("the server").add_argument
    add("--served-model-name", metavar="NAME", help="what clients call the model (the directory's name)")
    add("--adapter", metavar="NAME=DIR", nargs="+", action="extend", default=[], type=_read_adapter, dest="adapters",
        help="checkpoints of adapters (--save-adapter-only), each a further model of this name")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    add("--port", metavar="N", type=int, default=5000, help="port (5000); 0: any that is free")
    add("--api-key", metavar="KEY", help=f"what clients must send; else {_KEY_VARIABLE} of the environment")
    add("--api-key-file", metavar="FILE", type=path, help="file with a key on each line")
    add("--request-timeout", metavar="SECONDS", type=float, default=600.0, help="of one request (600)")
    add("--shutdown-timeout", metavar="SECONDS", type=float, default=5.0, help="of texts when a signal comes (5)")
    add("--max-waiting", metavar="N", type=int, default=256, help="requests that may wait; more get 429 (256)")
    add("--inference-text-gen-server-logging", action="store_true", help="a line for each request")
    add("--inference-logging-step-interval", metavar="N", type=int, default=0, help="a line every N passes (0: none)")
    _add_engine_arguments(parser)
    arguments, rest = parser.parse_known_args(argv)
    rest, arguments.training_flags = take_training_flags(rest)
    arguments.notes = [*read_upstream_flags(rest, parser.see)]
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port} must be 0 to 65535")
    if arguments.inference_logging_step_interval < 0:
        raise ConfigError("--inference-logging-step-interval must be at least 0, for no lines")
    if not (arguments.inference_dynamic_batching_buffer_size_gb or 1) > 0:
        raise ConfigError("--inference-dynamic-batching-buffer-size-gb must be above 0")
    if arguments.no_prefix_caching and arguments.inference_dynamic_batching_prefix_caching:
        raise ConfigError("--inference-dynamic-batching-prefix-caching and its opposite are given; leave one out")
    if not arguments.request_timeout > 0 or arguments.max_waiting < 0:
        raise ConfigError("--request-timeout must be above 0, and --max-waiting at least 0")
    if arguments.draft_model is not None and (arguments.num_speculative_tokens < 1 or arguments.speculate == "mtp"):
        raise ConfigError(
            "--draft-model drafts --num-speculative-tokens, which must be at least 1, without --speculate"
        )
    if not 0 <= arguments.shutdown_timeout < float("inf"):
        raise ConfigError(f"--shutdown-timeout {arguments.shutdown_timeout} must be at least 0, a number of seconds")
    if arguments.adapters and arguments.num_speculative_tokens and arguments.speculate == "mtp":
        raise ConfigError("--speculate mtp reads the states of one pass, and --adapter makes several; leave one out")
    names = [name for name, _ in arguments.adapters]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--adapter: the name {min(repeated)} is given twice")
    if not arguments.load.exists():
        raise ConfigError(f"--load {arguments.load} does not exist")
    return arguments


def _read_adapter(text: str) -> tuple[str, Path]:
    """A name and a directory, NAME=DIR."""
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=DIR")
    return name, path(directory)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the engine").add_argument
    begin = "--inference-dynamic-batching-"
    add("--inference-max-seq-length", metavar="N", type=int, help="tokens of a text, prompt included (the model's)")
    add(f"{begin}max-requests", "--inference-max-requests", metavar="N", type=int, default=64,
        dest="inference_dynamic_batching_max_requests", help="at work together (64)")  # fmt: skip
    add(f"{begin}max-tokens", metavar="N", type=int, default=512, help="of one pass (512)")
    add("--capacity-tokens", metavar="N", type=int, help="tokens of all texts together (8 of the longest)")
    add(f"{begin}buffer-size-gb", metavar="X", type=float, help="the same as memory of each process, in GB")
    add(f"{begin}prefix-caching", action="store_true", help="texts that begin alike share memory (on)")
    add("--no-prefix-caching", f"--no-{begin[2:]}prefix-caching", action="store_true", help="compute every prompt anew")
    add(f"{begin}logprobs-mode", choices=["raw_logprobs"], help="log-probabilities are the model's own")
    add("--batch-invariant-mode", action="store_true", help="every text to the bit as alone: one pass for each")
    add(f"{begin}num-cuda-graphs", metavar="N", type=int, default=0, dest="num_cuda_graphs",
        help="numbers of texts that have a CUDA graph (0: none; -1: each half of the next)")  # fmt: skip
    add(f"{begin}cuda-graph-sizing-distribution", choices=["exponential", "linear"], default="exponential",
        dest="graph_distribution", help="distances of these numbers (exponential)")  # fmt: skip
    add("--inference-cuda-graph-scope", choices=["none", "layer", "block"], default="block",
        help="none: no CUDA graphs; else all layers are one (block)")  # fmt: skip
    add("--num-speculative-tokens", metavar="N", type=int, default=0, help="tokens drafted at a time (0: none)")
    add("--speculate", choices=["lookup", "mtp"], default="lookup", help="who drafts them (lookup: the text so far)")
    add("--draft-model", metavar="DIR", type=path, help="a smaller model's checkpoint, of the same tokens, drafts them")


def read_keys(arguments: argparse.Namespace, environment: dict[str, str]) -> tuple[str, ...]:
    """The keys of which clients must send one; none where everybody may ask."""
    keys = [arguments.api_key] if arguments.api_key is not None else []
    if arguments.api_key_file is not None:
        try:
            keys += arguments.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {arguments.api_key_file} cannot be read: {error}") from error
    if not keys and environment.get(_KEY_VARIABLE):
        keys = [environment[_KEY_VARIABLE]]
    if "" in keys or (not keys and arguments.api_key_file is not None):
        raise ConfigError("--api-key is empty, like a shell variable that is not set; give a key, or leave it out")
    return tuple(keys)


def open_socket(host: str, port: int) -> socket.socket:
    """The socket that the server listens on. Raises ConfigError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; give another port") from error
    return found


def start_server(application: Any, listening: socket.socket, *, logs: bool = False) -> tuple[Any, threading.Thread]:
    """Run uvicorn in a separate thread: signals are the main thread's. logs: a line for each request."""
    from megatron.core.optional_deps import require

    uvicorn = require("uvicorn", needed_by="serve")
    # Connections that are open at the end are cut after a second: all of it has 10. The application queues by itself;
    # beyond this many connections there is an attack, or a client that does not close them.
    config = uvicorn.Config(
        application.build(), log_level="info" if logs else "warning", access_log=logs, timeout_keep_alive=30,
        timeout_graceful_shutdown=1, limit_concurrency=2048, lifespan="off",
    )  # fmt: skip
    # Those are no errors.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_cut_off(record))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True)
    thread.start()
    return server, thread


def _is_cut_off(record: logging.LogRecord) -> bool:
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def build_engine(
    arguments: argparse.Namespace, trained: TrainedModel, recorder: Recorder | None = None
) -> tuple[Engine, ServedModel]:
    """The engine, and what the server knows of its model. recorder: of CUDA graphs, where there is a GPU."""
    from megatron.core.inference.engine import Engine, EngineSettings
    from megatron.core.inference.model_runner import ModelRunner
    from megatron.serving.answers import ServedModel

    longest = trained.max_sequence_length or trained.config.data.seq_length or _UNKNOWN_LENGTH
    asked = arguments.inference_max_seq_length
    if asked is not None and trained.max_sequence_length is not None and asked > longest:
        raise ConfigError(f"--inference-max-seq-length {asked}: the model has {longest} positions; give at most that")
    longest = longest if asked is None else asked
    # Pages are taken as texts grow, so that many more short texts fit.
    capacity = arguments.capacity_tokens or 8 * longest
    if (gigabytes := arguments.inference_dynamic_batching_buffer_size_gb) is not None:
        capacity = int(gigabytes * 2**30 / max(1, ModelRunner(trained.model).measure_token_bytes()))
    settings = EngineSettings(
        longest,
        capacity_tokens=capacity,
        max_requests=arguments.inference_dynamic_batching_max_requests,
        max_step_tokens=arguments.inference_dynamic_batching_max_tokens,
        reuses_prefixes=not arguments.no_prefix_caching,
        batch_invariant=arguments.batch_invariant_mode,
        graph_sizes=choose_graphs(arguments, trained, recorder),
    )
    drafter = build_drafter(arguments, trained, longest)
    adapters = load_adapters(arguments, trained)
    engine = Engine(
        trained.model, settings, vocab_size=trained.vocab_size, drafter=drafter, recorder=recorder, adapters=adapters
    )
    tokenizer = trained.tokenizer
    ends = [tokenizer.eod] if tokenizer.eod is not None and tokenizer.eod >= 0 else []
    if tokenizer.chat_template is not None:
        ends += tokenizer.find_answer_ends()
    name = arguments.served_model_name or Path(arguments.load).resolve().name
    if name in adapters.names:
        raise ConfigError(f"--adapter {name}=...: the model has this name; give another, or --served-model-name")
    facts = (name, tokenizer, longest, trained.vocab_size, tuple(dict.fromkeys(ends)))
    return engine, ServedModel(*facts, adapters=adapters.names)


def load_adapters(arguments: argparse.Namespace, trained: TrainedModel) -> NamedAdapters:
    """The adapters of the command line. Raises CheckpointError for another model's."""
    from megatron.core.inference.named_adapters import NamedAdapters
    from megatron.training.checkpoint.trained_model import add_trained_adapters

    if arguments.adapters and trained.config.model.lora_rank is not None:
        raise ConfigError(f"--load {arguments.load} has adapters already; give the model that --adapter belongs to")
    found = NamedAdapters()
    for name, directory in arguments.adapters:
        add_trained_adapters(trained, directory, f"--adapter {name}=")
        found.take(name, trained.model)
    return found


def choose_graphs(arguments: argparse.Namespace, trained: TrainedModel, recorder: Recorder | None) -> tuple[int, ...]:
    """The numbers of texts whose passes become CUDA graphs; none, and a note, where they cannot."""
    from megatron.core.inference.model_runner import ModelRunner
    from megatron.core.inference.recorded_passes import choose_graph_sizes, find_obstacle

    most, count = arguments.inference_dynamic_batching_max_requests, arguments.num_cuda_graphs
    sizes = choose_graph_sizes(most, count, arguments.graph_distribution)
    if not sizes or arguments.inference_cuda_graph_scope == "none":
        return ()
    obstacle = "there is no GPU" if recorder is None else find_obstacle(ModelRunner(trained.model).core)
    if obstacle is None and arguments.adapters:
        obstacle = "--adapter changes layers between passes"
    if obstacle is None and arguments.speculate == "mtp" and arguments.num_speculative_tokens:
        obstacle = "--speculate mtp reads the states of each pass"
    if obstacle is None:
        return sizes
    if speaks():
        say(f"note: --inference-dynamic-batching-num-cuda-graphs {count} has no effect: {obstacle}", sys.stderr)
    return ()


def build_drafter(arguments: argparse.Namespace, trained: TrainedModel, longest: int) -> Drafter | None:
    """Build the drafter of tokens, for texts that have at most `longest`; None where nothing drafts. Raises ConfigError
    for a draft model of other tokens or of fewer positions."""
    from megatron.core.inference.model_runner import ModelRunner
    from megatron.core.inference.speculation import ModelDrafter, PredictionDrafter, PromptLookup
    from megatron.core.tensor_parallel.packed_products import pack_weights
    from megatron.training.checkpoint.trained_model import LAYOUT, load_trained_model

    most = arguments.num_speculative_tokens
    if arguments.draft_model is not None:
        groups, divided = ModelRunner(trained.model).groups, trained.config.model
        layout = {name: size for name in LAYOUT if (size := getattr(divided, name) or 1) > 1}
        smaller = load_trained_model(arguments.draft_model, bf16=arguments.bf16, layout=layout, groups=groups)
        for what, found, expected in (
            ("tokens", smaller.vocab_size, trained.vocab_size),
            (
                "tokens with padding",
                getattr(smaller.model, "vocab_size", None),
                getattr(trained.model, "vocab_size", None),
            ),
            ("positions", min(smaller.max_sequence_length or longest, longest), longest),
        ):
            if found != expected:
                raise ConfigError(f"--draft-model {arguments.draft_model} has {found} {what}; {expected} are needed")
        pack_weights(smaller.model)
        return ModelDrafter(smaller.model, most)
    if most < 1:
        return None
    return PredictionDrafter(trained.model) if arguments.speculate == "mtp" else PromptLookup(most)


def open_recorder() -> Recorder | None:
    """The recorder of the GPU that this process computes on; None on a CPU."""
    from megatron.core.device import current_device, is_cuda
    from megatron.core.device_graphs import GraphRecorder

    return GraphRecorder() if is_cuda(current_device()) else None


def serve(arguments: argparse.Namespace, environment: dict[str, str]) -> int:
    """Listen, load the model, and answer until a signal comes. Returns the exit code."""
    from megatron.serving.app import Application, Limits
    from megatron.serving.service import Service

    keys = read_keys(arguments, environment)
    is_local = arguments.host in ("127.0.0.1", "localhost", "::1")
    service = Service(arguments.max_waiting, arguments.inference_logging_step_interval)

    def end(*_: object) -> None:
        # A launcher sends it to all processes; those that follow rank 0 in passes end when it says so.
        service.drain(arguments.shutdown_timeout)
        if service.engine is None:  # nobody waits for a model that is being loaded
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if not speaks():
        with open_model(arguments) as trained:
            service.run(build_engine(arguments, trained, open_recorder())[0])
        return 0
    limits = Limits(request_seconds=arguments.request_timeout, api_keys=keys, is_local=is_local)
    application = Application(service, limits)
    listening = open_socket(arguments.host, arguments.port)
    server, thread = start_server(application, listening, logs=arguments.inference_text_gen_server_logging)
    for note in arguments.notes:
        say(f"note: {note}", sys.stderr)
    address = f"http://{arguments.host}:{listening.getsockname()[1]}"
    say(f"listening on {address}, loading the model", sys.stderr)
    if not is_local and not keys:
        say("warning: everybody who reaches this address may use the model; give --api-key", sys.stderr)
    try:
        with open_model(arguments) as trained:
            for note in compare_with_checkpoint(arguments.training_flags, trained.config):
                say(f"note: {note}", sys.stderr)
            engine, application.served = build_engine(arguments, trained, open_recorder())
            if service.state == "loading":
                say(f"ready: {application.served.name} at {address}", sys.stderr)
            service.run(engine)
    except RuntimeError as error:
        raise TemporaryError(f"the model failed: {error}") from error
    finally:
        server.should_exit = True
        # A daemon: a connection that does not end keeps nobody waiting.
        thread.join(timeout=3)
        listening.close()
    return 0


@command_line
def main() -> int:
    """Read the command line and serve."""
    return serve(parse_arguments(sys.argv[1:]), dict(os.environ))
