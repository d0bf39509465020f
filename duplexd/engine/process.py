"""The engine process: one model, one arena, all lanes, one Python thread that drives them."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from duplexd import clock
from duplexd.channel import PICTURES_PER_SLOT, Channel, MediaShape, SharedMedia
from duplexd.config import AUTO_FACE, NO_FACE
from duplexd.engine.admission import TARGET, Aimd, Door, places_of
from duplexd.engine.bargein import BargeInRule, BargeInTunables
from duplexd.engine.core import EngineCore
from duplexd.engine.governor import LEVELS, Fidelity, Governor, levels_down_to
from duplexd.engine.live import LiveWorld
from duplexd.engine.loop import Core, drive
from duplexd.engine.policy import policy_of
from duplexd.engine.residency import Residency, ThreadTime, nothing_measured
from duplexd.engine.speculation import SpeculationTunables
from duplexd.engine.stores import PAGES, Stores
from duplexd.engine.trace import TracedCore, TraceWriter, header_of
from duplexd.errors import ConfigError, DuplexdError
from duplexd.media.endpoint import EndpointRule, Scale, default_rule
from duplexd.memory.guards import Freed
from duplexd.memory.layout import ArenaLayout, PartitionSpec, host_partition, resident_layout
from duplexd.memory.sizing import Footprint, resident_in
from duplexd.streams.graph import ModelPlan, face_lanes
from duplexd.streams.lane import Fences, HostLane, Lane, StreamLane
from duplexd.streams.mover import BANDWIDTH, Mover, mover_spec
from duplexd.streams.stage import Role, Stage, StageSpec
from duplexd.units import NANOS_PER_SECOND, Nanos, nanos_from_ms, text_from_bytes, ticks_from_ms

#: Threads that make pictures get what those of the voice leave (nice 10, see `HostLane`).
FACE_PRIORITY = -2
CPU, CUDA = "cpu", "cuda"
LOAD_WITHIN = Nanos(180 * NANOS_PER_SECOND)
CLOSE_WITHIN = Nanos(2 * NANOS_PER_SECOND)

log = logging.getLogger("duplexd.engine")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the front end tells a new engine process."""

    model: str
    media: MediaShape
    sessions_max: int
    sessions_resident: int = 0  #: whose whole contexts fit into the arena beside each other; 0: all
    memory_bytes: int = 0  #: of the device, from which `sessions_resident` follows; 0: it is as it stands
    face_least: str = "still"  #: level of a face (governor.py) below which sessions are refused instead
    place_wait_ms: float = 3000.0
    lanes_target: float = TARGET  #: utilisation beyond which late listeners cost places; 0: places stay as declared
    policy: str = "interaction"
    policy_options: dict[str, str] = {}
    device: str = CPU
    speculation: bool = True
    model_options: dict[str, str] = {}
    faceless: str = ""  #: why the model's own face, which was wanted, is not shown; filled in by the engine
    silence_max_ms: float = 700.0
    voice_min_ms: float = 200.0
    voice_end_ms: float = 300.0
    judge_max_ms: float = 1600.0
    trace: str = ""  #: file that every event and command is written to; '': none
    trace_bytes_max: int = 256_000_000


def load_plan(model: str, options: Mapping[str, str], *, device: str = CPU) -> ModelPlan:
    """A model family by its entry point, for a device (`check_device`).

    Raises:  ConfigError with the names there are, or when the family does not know the option `device`.
    """
    found = entry_points(group="duplexd.models")
    names = sorted({entry.name for entry in found})
    entry = next((entry for entry in found if entry.name == model), None)
    if entry is None:
        raise ConfigError(f"there is no model {model!r}; installed are {', '.join(names) or 'none'}")
    plan = entry.load()(options if device == CPU else {**options, "device": device})
    assert isinstance(plan, ModelPlan)
    return plan


def check_device(device: str) -> None:
    """Raises ConfigError unless the engine can run there: on the CPU, or on a CUDA device that torch sees."""
    import torch

    kind, _, index = device.partition(":")
    if kind not in (CPU, CUDA) or (index and not (kind == CUDA and index.isdigit())):
        raise ConfigError(f"device is {device!r}; allowed are {CPU}, {CUDA} and {CUDA}:NUMBER")
    there = torch.cuda.device_count() if kind == CUDA else 1
    if int(index or 0) >= there:
        raise ConfigError(f"device is {device!r}; torch {torch.__version__} sees {there} CUDA devices")


def lanes_of(stages: Mapping[str, Stage], device: str) -> dict[str, Lane]:
    """A lane for every name that stages give: worker threads, on a CUDA device each with a stream of its own."""
    fences = Fences()
    calm = face_lanes(stage.spec for stage in stages.values())
    lanes: dict[str, Lane] = {}
    for name in dict.fromkeys(stage.spec.lane for stage in stages.values()):
        priority = FACE_PRIORITY if name in calm else 0
        lanes[name] = (
            HostLane(name, fences, priority=priority)
            if device == CPU
            else StreamLane(name, fences, priority=priority, device=device)
        )
    return lanes


def with_face_of(plan: ModelPlan, config: EngineConfig) -> EngineConfig:
    """The configuration that names the face which was found where "auto" was asked for: a trace of it replays where
    another face, or none, can be drawn.
    """
    if config.model_options.get("face") != AUTO_FACE:
        return config
    shown = NO_FACE if plan.face is None else plan.face.character
    options = {**config.model_options, "face": shown}
    return msgspec.structs.replace(config, model_options=options, faceless=plan.faceless)


def layout_of(plan: ModelPlan, sessions_max: int, sessions_resident: int = 0) -> ArenaLayout:
    """The arena: pages for the resident sessions, everything else for all of them."""
    return resident_layout(plan.partitions, sessions=sessions_max, resident=sessions_resident or sessions_max)


def resident_of(config: EngineConfig, plan: ModelPlan) -> int:
    """Sessions that are resident at once; 0: all. Raises ConfigError when the budget holds not even one."""
    if not config.memory_bytes:
        return config.sessions_resident
    footprint = Footprint(plan.name, plan.partitions, plan.weights_bytes, plan.weights_held)
    return resident_in(footprint, memory_bytes=config.memory_bytes, sessions=config.sessions_max)


def host_of(layout: ArenaLayout, sessions_max: int) -> PartitionSpec | None:
    """Host memory for the whole contexts of all sessions; None when they fit into the arena."""
    pages = layout.partitions[PAGES]
    resident = pages.sessions
    if resident is None or resident >= sessions_max:
        return None
    return host_partition(pages, sessions_max * pages.session_slots)


def stores_of(
    layout: ArenaLayout,
    *,
    out_slots: int,
    host: PartitionSpec | None = None,
    picture_slots: int = 0,
    sessions_max: int = 1,
    freed: Freed | None = None,
) -> Stores:
    pages = layout.partitions[PAGES]
    extents = pages.session_slots + pages.shared_slots
    return Stores(
        layout,
        out_slots=out_slots,
        context_extents_max=extents,
        host=host,
        picture_slots=picture_slots,
        sessions_max=sessions_max,
        freed=freed,
    )


def endpoint_of(plan: ModelPlan, silence_max_ms: float) -> EndpointRule:
    """The endpoint rule of a model: with a judge the measured table, without one silence alone."""
    if plan.stage(Role.JUDGE) is None:
        return EndpointRule((), silence_max=_always(silence_max_ms))
    rule = default_rule()
    return EndpointRule(rule.rows, silence_max=_capped(rule.silence_max, silence_max_ms))


def _always(ms: float) -> Scale:
    return Scale(asked=ms, closed=ms, unknown=ms, open=ms)


def _capped(scale: Scale, ms: float) -> Scale:
    """Silence alone ends a turn after `silence_max_ms` at the latest, whatever the words look like."""
    return Scale(*(min(ms, value) for value in scale.values))


def stages_of(plan: ModelPlan, layout: ArenaLayout, sessions_max: int) -> dict[str, Stage]:
    """The family's stages, and the mover when sessions may leave for host memory."""
    stages = plan.build()
    host = host_of(layout, sessions_max)
    if host is not None:
        mover = Mover(layout.partitions[PAGES], host)
        stages[mover.spec.name] = mover
    return stages


def residency_of(
    plan: ModelPlan,
    layout: ArenaLayout,
    mover: StageSpec | None,
    *,
    sessions_max: int,
    cores: int | None,
    least: Fidelity = LEVELS[-1],
    thread_time: ThreadTime = nothing_measured,
) -> Residency:
    pages = layout.partitions[PAGES]
    page_us = mover.cost.per_unit_us if mover is not None else 0
    return Residency(
        places=places_of(plan.stages.values(), contexts=pages.sessions or sessions_max, cores=cores, least=least),
        sessions_max=sessions_max,
        page_bytes=pages.slot_bytes,
        pages=pages.count - pages.shared_slots,
        bytes_per_second=pages.slot_bytes * 1_000_000 // page_us if page_us else 0,
        session_pages=pages.session_slots,
        thread_time=thread_time,
    )


def door_of(
    plan: ModelPlan, layout: ArenaLayout, *, sessions_max: int, cores: int | None, least: Fidelity = LEVELS[-1]
) -> Door:
    pages = layout.partitions[PAGES]
    return Door(
        plan.stages.values(),
        sessions_max=sessions_max,
        contexts=pages.sessions or sessions_max,
        context_bytes=pages.session_slots * pages.slot_bytes,
        session_bytes=layout.session_bytes,
        cores=cores,
        least=least,
    )


def core_of(
    config: EngineConfig,
    plan: ModelPlan,
    layout: ArenaLayout,
    *,
    cores: int | None = None,
    copy_bytes_per_second: float = BANDWIDTH,
    freed: Freed | None = None,
    thread_time: ThreadTime = nothing_measured,
) -> EngineCore:
    """The core of an engine.

    Args:    cores: that its lanes share; None in a world whose lanes do not.
             copy_bytes_per_second: what the copy lane is taken to carry, where pages leave for host memory.
             freed: told of slots of the arena at the moment they may be handed out again.
             thread_time: what the core measures itself with (`EngineCore.measured`); nothing is decided by it.
    """
    _check_pictures(config, plan)
    host = host_of(layout, config.sessions_max)
    mover = None if host is None else mover_spec(layout.partitions[PAGES], bandwidth=copy_bytes_per_second)
    levels = levels_down_to(config.face_least)
    least = levels[-1]
    residency = residency_of(
        plan, layout, mover, sessions_max=config.sessions_max, cores=cores, least=least, thread_time=thread_time
    )
    return EngineCore(
        plan=plan,
        stores=stores_of(
            layout,
            out_slots=config.media.out_slots,
            host=host,
            picture_slots=config.media.picture_slots,
            sessions_max=config.sessions_max,
            freed=freed,
        ),
        policy=policy_of(config.policy, config.policy_options),
        endpoint=endpoint_of(plan, config.silence_max_ms),
        barge_in=BargeInRule(tunables_of(config)),
        door=door_of(plan, layout, sessions_max=config.sessions_max, cores=cores, least=least),
        residency=residency,
        place_wait=nanos_from_ms(config.place_wait_ms),
        speculation=SpeculationTunables() if config.speculation else SpeculationTunables(turn_max=0),
        mover=mover,
        admission=Aimd(
            residency.places,
            contexts=layout.partitions[PAGES].sessions or config.sessions_max,
            target=config.lanes_target,
        ),
        cores=cores,
        governor=Governor(levels),
        faceless=config.faceless,
    )


def tunables_of(config: EngineConfig) -> BargeInTunables:
    return BargeInTunables(
        voice_min=ticks_from_ms(config.voice_min_ms),
        silence_end=ticks_from_ms(config.voice_end_ms),
        decide_max=ticks_from_ms(config.judge_max_ms),
    )


def _check_pictures(config: EngineConfig, plan: ModelPlan) -> None:
    """Raises ConfigError when the pictures of this model do not fit the shared memory."""
    if plan.face is None:
        return
    width, height = plan.face.size
    needed = PICTURES_PER_SLOT * width * height * 3 // 2
    if config.media.picture_bytes < needed or config.media.picture_slots < config.sessions_max:
        raise ConfigError(
            f"model {plan.name} makes pictures of {width}x{height}: {PICTURES_PER_SLOT} of them take {needed:,} bytes; "
            f"there are {config.media.picture_slots} slots of {config.media.picture_bytes:,} bytes for "
            f"{config.sessions_max} sessions"
        )


def trace_of(config: EngineConfig, plan: ModelPlan, *, cores: int | None) -> TraceWriter | None:
    """The trace this engine writes, if it was told to. Raises TraceError when the file cannot be made."""
    if not config.trace:
        return None
    header = header_of(config, plan, cores=cores, written_at=clock.wall_seconds())
    writer = TraceWriter(Path(config.trace), header, bytes_max=config.trace_bytes_max)
    log.info("the trace goes to %s, at most %s of it", writer.path, text_from_bytes(config.trace_bytes_max))
    return writer


def run(config: EngineConfig, channel: Channel, media: SharedMedia) -> None:
    """Serve until the front end is gone."""
    # torch belongs to this process alone; importing it here keeps the front end free of it.
    import torch

    from duplexd.memory.arena import Arena
    from duplexd.streams.executor import Executor

    check_device(config.device)
    torch.set_num_threads(1)  # Lanes overlap each other; threads inside an op only fight them for two cores.
    torch.set_grad_enabled(False)
    # On CUDA, convolutions would round to 10 bits of mantissa: a voice in chunks would not equal the voice whole.
    torch.backends.cudnn.allow_tf32 = False
    # Lanes hand the interpreter over often: with the default of 5 ms a 0.1 ms copy waits behind a decoding step.
    sys.setswitchinterval(0.0005)
    plan = load_plan(config.model, config.model_options, device=config.device)
    config = with_face_of(plan, config)
    if config.faceless:
        log.warning("the character has no face: %s", config.faceless)
    config = msgspec.structs.replace(config, sessions_resident=resident_of(config, plan))
    layout = layout_of(plan, config.sessions_max, config.sessions_resident)
    log.info("arena of %s\n%s", plan.name, layout.describe())
    stages = stages_of(plan, layout, config.sessions_max)
    executor = Executor(stages, lanes_of(stages, config.device), media)
    cores = os.cpu_count() if config.device == CPU else None
    writer = trace_of(config, plan, cores=cores)
    executor.open()
    try:
        executor.load(Arena(layout, config.device), within=LOAD_WITHIN)
        engine = core_of(config, plan, layout, cores=cores, thread_time=clock.thread_time)
        log.info("%s", engine.describe_admission())
        core: Core = engine
        drive(core if writer is None else TracedCore(core, writer), LiveWorld(channel, executor, engine.measured))
    finally:
        if writer is not None:
            writer.close()
        wedged = executor.close(within=CLOSE_WITHIN)
        if wedged:
            log.error("lanes %s are wedged; leaving without them", ", ".join(wedged))
            os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description="duplexd engine process; started by the front end")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the channel")
    parser.add_argument("--media", type=int, required=True, help="descriptor of the shared media")
    parser.add_argument("--config", required=True, help="engine configuration, JSON")
    arguments = parser.parse_args()
    logging.basicConfig(level=os.environ.get("DUPLEXD_LOG_LEVEL", "INFO"), format="%(asctime)s %(name)s %(message)s")
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    channel = Channel(socket.socket(fileno=arguments.channel))
    try:
        run(config, channel, SharedMedia(config.media, arguments.media))
    except DuplexdError as error:
        print(f"duplexd: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
