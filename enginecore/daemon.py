"""One engine, from its flags to its end: find the model, start the workers, bind the socket, run the loop.

Called by `enginecore` (cli.py, stand-alone) and by `python -m quire.enginecore` (__main__.py, as a child of a server or an LLM
object). Every failure to start is a StartupError, whose text is for the user.
"""

import bisect
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from quire.enginecore.adapters.start import read_modules, register
from quire.enginecore.core import HEARTBEAT_INTERVAL_S, CoreConfig, EngineCore
from quire.enginecore.device import Gpu, find_gpus, sizes_in_words, unfit_for_ranks
from quire.enginecore.garbage import keep_pauses_short
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.grammar.mask_threads import mask_threads
from quire.enginecore.hosts.placement import PlacementError
from quire.enginecore.hosts.remote_host import HostFailed
from quire.enginecore.hosts.setup import is_spread, place_ranks
from quire.enginecore.kv.manager import KVManager
from quire.enginecore.loading.fingerprint import model_digest
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.media_files import processor_files
from quire.enginecore.loading.model_files import ModelSummary, frontend_files, model_summary, resolve_model, resolve_tokenizer
from quire.enginecore.loading.model_names import served_name
from quire.enginecore.loading.speculation_start import drafts_told, say_drafts, with_draft_model, with_verifier
from quire.enginecore.loading.task_adapters import with_task_adapters
from quire.enginecore.params_check import ParamsCheck
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.prefill_budget import mixed_step_tokens
from quire.enginecore.sizes_log import log_sizes
from quire.enginecore.stop_signals import EarlyStop, on_stop_signals
from quire.enginecore.whole_texts import step_tokens
from quire.enginecore.worker_profiles import WorkersFailed
from quire.enginecore.worker_supervisor import SAY_EVERY_S, log_slow_start
from quire.enginecore.workers import WorkerGroup
from quire.ipc.adapters import AdapterError
from quire.ipc.bundled import bundled
from quire.ipc.config import EngineConfig
from quire.ipc.cpu_memory import available
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.curve import CoreKeys, load_core_keys, load_or_make_keys
from quire.ipc.links.welcome import file_infos, new_epoch
from quire.ipc.memory_plan import default_block_size, default_max_num_seqs
from quire.ipc.messages.frontend import PROTOCOL_VERSION, EngineLimits, Heartbeat, Welcome
from quire.ipc.messages.stats import CacheInfo
from quire.ipc.messages.utilities import ServerInfo
from quire.ipc.messages.workers import KVGroupKind, WorkerProfile
from quire.ipc.process.children import Child
from quire.ipc.process.cpus import cpu_share
from quire.ipc.version import VERSION
from quire.ipc.worker_config import ResolvedEngineConfig, WorkerConfig, resolved

log = logging.getLogger("quire.enginecore")

DRAIN_S = 30.0
SWITCH_S = 5e-5  # longest time that a spinning core keeps the interpreter from the thread that makes masks


class StartupError(Exception):
    """The engine cannot start; the text is for the user. from_outside: a signal from outside ended or stopped a worker."""

    def __init__(self, text: str, from_outside: bool = False) -> None:
        super().__init__(text)
        self.from_outside = from_outside


def run_engine(
    config: EngineConfig,
    on_ready: Callable[[str], None],
    prespawned: Child,
    on_heartbeat: Callable[[], None] = lambda: None,
    on_served: Callable[[], None] = lambda: None,
) -> None:
    """Run one engine until it is told to stop. `on_ready` gets the address once requests can come; from then on `on_heartbeat`
    is called every HEARTBEAT_INTERVAL_S by the loop, and `on_served` with the first step of each generation of workers.

    prespawned: the first worker's process, which waits for its configuration; it has ended when this returns or raises. Raises
    StartupError or Stopped before it is ready, WorkersFailed when the workers are lost for good.
    """
    early, is_ready = EarlyStop(), False
    on_stop_signals(early)

    def ready(address: str) -> None:
        nonlocal is_ready
        is_ready = True
        on_ready(address)

    try:
        _run(config, ready, prespawned, on_heartbeat, on_served, early)
    except AdapterError as error:
        raise StartupError(str(error)) from error
    except (OSError, zmq.ZMQError) as error:  # out of descriptors, memory or processes
        if is_ready:
            raise
        raise StartupError(f"the machine does not let it start: {error}") from error
    finally:
        on_stop_signals(signal.SIG_IGN)  # this process ends, and the caller still reports why
        prespawned.terminate(0.0)


def _run(
    config: EngineConfig,
    on_ready: Callable[[str], None],
    prespawned: Child,
    on_heartbeat: Callable[[], None],
    on_served: Callable[[], None],
    early: EarlyStop,
) -> None:
    started = time.monotonic()
    try:
        has_weights, place, token = config.load_format != "dummy", config.download_dir, config.hf_token
        folder = resolve_model(config.model, config.revision, place, has_weights, token, config.runner)
        config, folder = with_verifier(config, folder)
        tokenizer = resolve_tokenizer(config.tokenizer, folder, place, config.tokenizer_revision, token)
        defaults, overrides = config.generation_config, config.override_generation_config
        summary = model_summary(folder, tokenizer, defaults, config.hf_overrides, overrides)
        form = config.chat_template_content_format
        files = frontend_files(folder, tokenizer, config.chat_template, defaults, overrides, form)
        digest = model_digest(folder, has_weights, config.hf_overrides)
        config = with_draft_model(config, folder, files["tokenizer.json"])
        config, tasks = with_task_adapters(config, folder)
        adapter_limits, at_start = read_modules(config, tasks)
        template = msgspec.structs.replace(worker_config(config, folder, summary), adapters=adapter_limits)
        template, ranks = place_ranks(config, template, folder)
    except (HostFailed, ModelFilesError, PlacementError) as error:
        raise StartupError(str(error)) from error
    workers = WorkerGroup(template, [prespawned], ranks)
    eos, threads = tuple(summary.eos_token_ids), mask_threads(cpu_share())
    grammars = GrammarCompiler(files.get("tokenizer.json"), summary.vocab_size, eos, threads)
    link = _bind(config)  # before anything slow, to report an address in use at once
    try:
        workers.start()
        grammars.start()  # while the workers load the model
        profile = _wait_until_ready(workers, link, early)
        core_config = core_config_of(summary, workers.template, profile)
        files |= processor_files(folder, core_config.limits.media)
        welcome = _welcome(config, link.epoch, core_config, summary, files, digest)
        checks_params = profile.processors is not None and profile.processors.checks_params
        preparers = [ParamsCheck(workers)] if checks_params else []
        core = EngineCore(core_config, link, workers, on_heartbeat, preparers, grammars)
        core.supervisor.on_served = on_served
        infos = register(core.requests.adapters, at_start, workers, early)
        link.set_welcome(msgspec.structs.replace(welcome, numerics=profile.numerics, adapters=infos), files)
        on_stop_signals(lambda *_: core.stop(0.0 if core.stopping else DRAIN_S))
        signal.signal(signal.SIGUSR1, lambda *_: core.ask_for_stacks())
        early.check()
        log.info("ready after %.1f s: %s", time.monotonic() - started, link.address)
        on_ready(link.address)
        keep_pauses_short()
        if core_config.spins:
            sys.setswitchinterval(SWITCH_S)
        with contextlib.closing(core):
            core.run()
    finally:
        workers.stop()
        ranks.close()
        grammars.close()
        link.close()


# ------------------------------------------------------------------------------------------------------ decisions
def worker_config(config: EngineConfig, folder: Path, summary: ModelSummary) -> WorkerConfig:
    """The template of all workers' configurations, with all defaults resolved. Raises StartupError."""
    gpus = find_gpus() if config.device != "cpu" else []
    if config.device == "cuda" and not gpus:
        raise StartupError("--device cuda: no CUDA device was found; leave --device out to run on the CPU")
    gpus = _own_gpus(config, gpus)
    device: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    shape = config.tensor_parallel_size, config.pipeline_parallel_size
    if gpus and not is_spread(config) and (problem := unfit_for_ranks(gpus, *shape)):
        raise StartupError(problem)
    max_model_len = config.max_model_len or summary.max_model_len
    if max_model_len > summary.max_model_len:
        raise StartupError(
            f"--max-model-len {max_model_len} is more than the model was made for ({summary.max_model_len}, by its config.json)"
        )
    try:
        tokens, max_model_len = step_tokens(config, summary.is_encoder, bool(gpus), max_model_len, summary.whole_image)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if device == "cpu" and config.host_memory_bytes is None and (found := available()) is not None:
        config = msgspec.structs.replace(config, host_memory_bytes=found.num_bytes, host_memory_limit=found.limit)
    engine = resolved(
        config,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or default_max_num_seqs(gpus[0].memory_bytes if gpus else 0, summary.keeps_states),
        max_num_batched_tokens=tokens,
        block_size=config.block_size or default_block_size(bool(gpus)),
    )
    return WorkerConfig(
        engine=engine,
        rank=0,
        generation=0,
        model_dir=str(folder),
        control_address="",
        plan_ring_fds=[],
        result_ring_fds=[],
        gpu_index=config.device_index,
    )


def _requests_seed(config: EngineConfig) -> int:
    """The seed for requests without one. It differs between engines of --data-parallel-size: otherwise a prompt that is sent
    many times would get the same answers from every engine."""
    return config.seed + (config.device_index if config.data_parallel_size > 1 else 0)


def _own_gpus(config: EngineConfig, gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs from this engine's first one on. Raises StartupError if there are too few for all engines."""
    size, shared_by = config.data_parallel_size, sizes_in_words(config.tensor_parallel_size, config.pipeline_parallel_size)
    needed = max(size * config.world_size, config.device_index + 1)
    if gpus and size > 1 and needed > len(gpus):
        flags = f"--data-parallel-size {size}" + (f" with {shared_by}" if config.world_size > 1 else "")
        there = "is 1" if len(gpus) == 1 else f"are {len(gpus)}"
        raise StartupError(f"{flags} needs {needed} GPUs, and there {there} (CUDA_VISIBLE_DEVICES counts)")
    if gpus and config.device_index >= len(gpus):
        raise StartupError(f"device_index {config.device_index}: GPUs are numbered 0 to {len(gpus) - 1} here")
    return gpus[config.device_index :]


def core_config_of(summary: ModelSummary, worker: WorkerConfig, profile: WorkerProfile) -> CoreConfig:
    """The core's configuration, after the workers have reported their capacity. Logs one line about memory."""
    engine = worker.engine
    kinds, media = tuple(g.kind for g in profile.kv_groups), profile.media
    scheduler = SchedulerConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=profile.num_blocks,
        kv_groups=kinds,
        num_states=profile.num_states,
        enable_prefix_caching=engine.enable_prefix_caching,
        policy=engine.scheduling_policy,
        look_ahead=engine.admission == "lookahead",
        eos_token_ids=tuple(summary.eos_token_ids),
        vocab_size=profile.vocab_size,
        mixed_step_tokens=mixed_step_tokens(profile.weights_bytes, engine.device),
        num_micro_batches=engine.pipeline_parallel_size,
        has_whole_prompts=profile.pooling is not None and profile.pooling.is_whole,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        speculation=engine.speculative_config,
        max_queue_s=engine.max_queue_s,
        encoder_rows=media.max_item_tokens if media is not None else 0,
        max_whole_span=media.max_whole_span if media is not None else 0,
        num_adapter_slots=worker.adapters.max_loras if worker.adapters is not None else 0,
    )
    capacity = kv_capacity_tokens(kinds, engine.block_size, profile.num_blocks, engine.max_model_len, scheduler.max_whole_span)
    log_sizes(engine, profile, capacity)
    say_drafts(engine.speculative_config)
    limits = EngineLimits(
        max_model_len=capacity,
        vocab_size=profile.vocab_size,
        max_num_seqs=engine.max_num_seqs,
        max_logprobs=engine.max_logprobs,
        takes_marks=bool(profile.num_states) and engine.enable_prefix_caching,
        pooling=profile.pooling,
        media=media,
        is_cut_by_steps=summary.is_encoder and engine.max_model_len == engine.max_num_batched_tokens < summary.max_model_len,
        adapters=worker.adapters,
    )
    if capacity < 2:
        raise StartupError("the KV cache has no room for even two tokens: give it more memory or smaller blocks")
    return CoreConfig(
        scheduler=scheduler,
        limits=limits,
        max_num_waiting=engine.max_num_waiting,
        max_num_queued_tokens=engine.max_num_queued_tokens,
        max_queue_s=engine.max_queue_s,
        seed=_requests_seed(engine),
        step_timeout_s=engine.step_timeout_s,
        spins=_spins(engine),
        log_requests=engine.enable_log_requests,
        log_stats=not engine.disable_log_stats,
        info=server_info(worker, profile, capacity),
        has_profiler=engine.profile_dir is not None,
        processors=profile.processors,
        replay=engine.replay,
        tells_drafts=drafts_told(engine) is not None,
    )


def _spins(engine: ResolvedEngineConfig) -> bool:
    """Whether there are cores for the core and its ranks, of all engines, and one for frontends."""
    return engine.device == "cuda" and cpu_share() > (1 + engine.world_size) * engine.data_parallel_size


def server_info(worker: WorkerConfig, profile: WorkerProfile, capacity: int) -> ServerInfo:
    """The engine's settings with defaults resolved, without keys, addresses and the template's text."""
    hidden = ("key", "secret", "password", "hf_token", "curve_", "listen", "hosts", "chat_template")
    names = [n for n in EngineConfig.__struct_fields__ if not any(word in n for word in hidden)]
    values = {name: getattr(worker.engine, name) for name in names}
    values |= {
        "interface": worker.bound_to.name,
        "device": profile.device,
        "max_model_len": capacity,
        "num_gpu_blocks": profile.num_blocks,
        "vocab_size": profile.vocab_size,
        "version": VERSION,
    }
    simple = (str, int, float, bool, list, type(None))
    return ServerInfo({name: value if isinstance(value, simple) else str(value) for name, value in values.items()})


def kv_capacity_tokens(
    kinds: tuple[KVGroupKind, ...], block_size: int, num_blocks: int, max_model_len: int, max_whole_span: int = 0
) -> int:
    """The longest single sequence that the KV blocks can hold, up to max_model_len. max_whole_span: see KVManager."""
    kv = KVManager(num_blocks, block_size, kinds, num_slots=1, max_whole_span=max_whole_span)
    return bisect.bisect_left(range(1, max_model_len + 1), True, key=lambda n: bool(kv.blocks_needed(n) >= num_blocks))


# ------------------------------------------------------------------------------------------------------- start-up
def _wait_until_ready(
    workers: WorkerGroup, link: CoreToFrontends, early: EarlyStop, say_every_s: float = SAY_EVERY_S
) -> WorkerProfile:
    """Wait for the workers; returns their capacity. Frontends that connect earlier get heartbeats, and wait."""
    started, say_after_s = time.monotonic(), say_every_s
    poller = zmq.Poller()
    for source in (*workers.pollables(), *link.sockets()):
        poller.register(source, zmq.POLLIN)
    heartbeat = Heartbeat(link.epoch, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0, ready=False)
    try:
        while not workers.is_ready:
            poller.poll(int(HEARTBEAT_INTERVAL_S * 1000))
            workers.messages()
            workers.check_alive()
            early.check()
            if (waited_s := time.monotonic() - started) >= say_after_s:
                say_after_s += say_every_s
                log_slow_start(workers, waited_s)
            link.receive()
            link.flush()
            link.broadcast(heartbeat)
    except WorkersFailed as error:
        raise StartupError(str(error), workers.kill()) from error
    assert workers.profile is not None
    return workers.profile


def _bind(config: EngineConfig) -> CoreToFrontends:
    try:
        return CoreToFrontends(config.listen, epoch=new_epoch(), keys=_core_keys(config))
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise StartupError(f"cannot listen at {config.listen}: {str(error).removeprefix(f'{config.listen}: ')}") from error


def _welcome(
    config: EngineConfig, epoch: int, core: CoreConfig, summary: ModelSummary, files: dict[str, bytes], digest: str
) -> Welcome:
    return Welcome(
        epoch=epoch,
        protocol=PROTOCOL_VERSION,
        served_model_names=config.served_model_name
        or [served_name(config.model) if config.model else bundled(config.runner).name],
        limits=core.limits,
        files=file_infos(files),
        eos_token_ids=list(summary.eos_token_ids),
        version=VERSION,
        created=int(time.time()),
        step_timeout_s=config.step_timeout_s,
        spins=core.spins,
        cache=CacheInfo(
            block_size=core.scheduler.block_size,
            num_gpu_blocks=core.scheduler.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            gpu_memory_utilization=config.gpu_memory_utilization,
            cache_dtype="auto",
        ),
        model_digest=digest,
        replay=config.replay,
        drafts_told=drafts_told(config),
    )


def _core_keys(config: EngineConfig) -> CoreKeys | None:
    """Keys for tcp://; the engine's own pair is made where its file does not exist yet."""
    if not config.curve_secret_key_file and not config.curve_allow_file:
        return None
    if not config.curve_secret_key_file or not config.curve_allow_file:
        raise ValueError("--curve-secret-key-file and --curve-allow-file go together")
    # logged before the list is read: a frontend needs this key for its first start, before its own key is on the list
    log.info("the engine's public key, for frontends: %s", load_or_make_keys(config.curve_secret_key_file).public.decode())
    return load_core_keys(config.curve_secret_key_file, config.curve_allow_file)
