"""The command line: `duplexd serve | fetch | doctor | config | plan | check-model | simulate | bench | ...`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from duplexd import __version__, weights
from duplexd.config import Config, describe, load
from duplexd.errors import ConfigError, DuplexdError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sys.exit(options.act(options))
    except DuplexdError as error:
        print(f"duplexd: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duplexd", description="Live, full-duplex sessions with a digital human.")
    parser.add_argument("--version", action="version", version=f"duplexd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    server = _command(commands, "serve", serve, "serve the page and its sessions", config=True)
    server.add_argument(
        "--fetch", action="store_true", help="first get the weights this model needs and that are missing"
    )
    _command(commands, "config", show_config, "print the effective configuration", config=True)
    _command(commands, "doctor", doctor, "check this machine: Python, torch, ports, UDP, weights", config=True)
    fetch = _command(commands, "fetch", fetch_weights, "fetch the default model's weights into the cache")
    fetch.add_argument("names", nargs="*", help="weights to fetch; none: all")
    fetch.add_argument("--quiet", action="store_true", help="say nothing about what is there already")
    fetch.add_argument("--check", action="store_true", help="only verify what is there, by hash")
    plan = _command(commands, "plan", plan_memory, "how many sessions a memory budget admits, and what takes the bytes")
    plan.add_argument("--model", default="pocket", help="an installed family or a published size; default: pocket")
    plan.add_argument("--memory", required=True, metavar="SIZE", help="what the device has left, such as 24GiB or 80GB")
    plan.add_argument("--host-memory", default="0", metavar="SIZE", help="for idle sessions that leave the device")
    plan.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the model")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    load = _command(commands, "simulate", simulate, "run a scenario in virtual time: same core, simulated people")
    load.add_argument("scenario", type=Path, metavar="SCENARIO.toml", help="see demos/scenarios")
    load.add_argument("--policy", default="interaction", help="scheduling policy; default: interaction")
    load.add_argument("--seed", type=int, default=1, help="same seed, same figures; default: 1")
    load.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    again = _command(commands, "replay", replay_trace, "run a trace again through the core and compare what it says")
    again.add_argument("file", type=Path, metavar="FILE", help="written by serve --trace")
    again.add_argument("--digest", action="store_true", help="print only the sha256 of all commands")
    drawing = _command(commands, "trace", draw_trace, "where the time of every turn went; draw a session as HTML")
    drawing.add_argument("file", type=Path, metavar="FILE", help="written by serve --trace")
    drawing.add_argument("--html", type=Path, metavar="OUT", help="draw lanes, chunks, cursors and turns into one file")
    drawing.add_argument("--json", type=Path, metavar="OUT", help="write the turns, event by event, as JSON")
    drawing.add_argument("--session", type=int, metavar="N", help="only this session")
    drawing.add_argument("--copies", action="store_true", help="list the copies of the person's sound as well")
    top = _command(commands, "top", watch, "a live view of a running daemon: sessions, lanes, arena, waste")
    top.add_argument("--url", help="default: where a daemon with this configuration listens")
    top.add_argument("--token", help="of the daemon, if it has one")
    top.add_argument("--config", metavar="FILE", help="the daemon's TOML file, for its address and token")
    top.add_argument("--rows", type=int, default=20, metavar="N", help="sessions shown at most; default: 20")
    top.add_argument("--once", action="store_true", help="print one frame and leave")
    check = _command(
        commands, "check-model", check_model, "try every promise of a model's stages on the stages themselves"
    )
    check.add_argument("name", help="an installed family, or face")
    check.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; the face's suite knows only cpu")
    from duplexd.bench.command import add_bench

    add_bench(commands)
    return parser


def _command(commands: Any, name: str, act: Any, text: str, *, config: bool = False) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(act=act)
    if config:
        add_config_flags(command)
    return command


def add_config_flags(command: argparse.ArgumentParser) -> None:
    """One flag for every option of `Config`; what is not given stays unset."""
    command.add_argument("--config", metavar="FILE", help="TOML file with options")
    types = get_type_hints(Config)
    for field in msgspec.structs.fields(Config):
        flag = f"--{field.name.replace('_', '-')}"
        if types[field.name] is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            command.add_argument(flag, metavar=field.name.upper(), help=f"default: {field.default!r}")


def config_of(options: argparse.Namespace) -> Config:
    flags = {field.name: getattr(options, field.name, None) for field in msgspec.structs.fields(Config)}
    return load(flags=flags, file=options.config)


def serve(options: argparse.Namespace) -> int:
    import uvloop

    from duplexd.webrtc.server import serve as run

    config = config_of(options)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("aioice").setLevel(logging.WARNING)
    needed = weights.needed(model=config.model, thinker=config.thinker)
    if options.fetch:
        weights.fetch_missing(needed)
    for name in needed:
        weights.path(name)  # Raises with the command that mends it, before anything is started.

    def started(url: str) -> None:
        print(f"\n  duplexd {__version__} is ready: {url}\n", flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config, started=started))
    return 0


def show_config(options: argparse.Namespace) -> int:
    print(describe(config_of(options)))
    return 0


def doctor(options: argparse.Namespace) -> int:
    from duplexd.doctor import examine

    return examine(config_of(options))


def plan_memory(options: argparse.Namespace) -> int:
    from duplexd.plan import show

    return show(
        model=options.model,
        options=options.option,
        memory=options.memory,
        host_memory=options.host_memory,
        file=options.json,
    )


def simulate(options: argparse.Namespace) -> int:
    from duplexd.simulation.command import simulate as run

    return run(options.scenario, policy=options.policy, seed=options.seed, output=options.json)


def replay_trace(options: argparse.Namespace) -> int:
    from duplexd.engine.replay import replay, sentences
    from duplexd.engine.trace import Trace

    trace = Trace(options.file)
    replayed = replay(trace)
    if options.digest:
        print(replayed.digest)
    else:
        print("\n".join(sentences(replayed, trace.began_at)))
    return 0 if replayed.difference is None else 1


def draw_trace(options: argparse.Namespace) -> int:
    from duplexd.drawing import show

    return show(options.file, html=options.html, json=options.json, session=options.session, copies=options.copies)


def watch(options: argparse.Namespace) -> int:
    from duplexd.top import url_of
    from duplexd.top import watch as run

    config = config_of(options)
    return run(options.url or url_of(config), token=config.token, rows=options.rows, once=options.once)


def check_model(options: argparse.Namespace) -> int:
    from importlib.metadata import entry_points

    from duplexd.config import OWN_FACES
    from duplexd.engine.process import CPU, check_device, load_plan
    from duplexd.models.contract import Finding, check_plan

    check_device(options.device)
    own = {entry.name: entry for entry in entry_points(group="duplexd.contracts")}
    if options.name in own and options.device != CPU:
        raise ConfigError(f"the suite of {options.name} runs on {CPU} only, not on {options.device}")
    face = {"face": OWN_FACES[options.name]} if options.name in OWN_FACES else {}

    def told(finding: Finding) -> None:
        said = "BROKEN: " + finding.fault if finding.fault else "holds"
        print(f"{finding.stage:18}{finding.rule:24}{said}", flush=True)

    findings: list[Finding] = []
    if options.name in own:
        findings = own[options.name].load()()
        for finding in findings:
            told(finding)
    else:
        plan = load_plan(options.name, face, device=options.device)
        findings = check_plan(plan, device=options.device, told=told)
    broken = sum(bool(finding.fault) for finding in findings)
    print(f"{options.name}: {len(findings) - broken} of {len(findings)} hold")
    return 1 if broken else 0


def fetch_weights(options: argparse.Namespace) -> int:
    if not options.check and options.quiet:
        weights.fetch_missing(options.names or tuple(weights.WEIGHTS))
    elif not options.check:
        weights.fetch(options.names)
    findings = weights.verify(options.names, deep=options.check)
    faults = [finding for finding in findings if finding.fault]
    for finding in faults:
        print(f"duplexd: {finding.file.name}: {finding.fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    main()
