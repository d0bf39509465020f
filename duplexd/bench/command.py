"""`duplexd bench`: talk, barge-in, uplink, soak, memory, scheduler, policies, costs, face; table and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any


def add_bench(commands: Any) -> None:
    """The bench commands; what they need is imported when they run."""
    bench = commands.add_parser("bench", help="measure this machine: at the loudspeaker, or its memory")
    kinds = bench.add_subparsers(required=True, metavar="BENCH")
    talk = kinds.add_parser("talk", help="voice to voice: questions spoken, answers heard")
    talk.add_argument("--turns", type=int, default=20)
    talk.add_argument("--pauses", type=int, default=20, help="utterances with a pause for thought, at most 20")
    talk.add_argument("--model", default="pocket", help="default: pocket")
    talk.add_argument(
        "--noise",
        type=float,
        default=20.0,
        metavar="DB",
        help="utterances with pauses come again in a room whose noise lies so far below the voice; default: 20",
    )
    talk.add_argument("--no-noise", action="store_true", help="they do not come again")
    talk.add_argument(
        "--from", dest="kept", type=Path, metavar="DIR", help="measure nothing: the figures of what --keep saved"
    )
    talk.add_argument(
        "--link", type=float, metavar="KBPS", help="over a link of so many kbit/s each way; 400 is a weak one (root)"
    )
    talk.add_argument("--pairs", action="store_true", help="every question twice: with speculative turns and without")
    _common(talk, run_talk)
    barge_in = kinds.add_parser("barge-in", help="interruptions: when it is quiet, and what is remembered")
    barge_in.add_argument("--count", type=int, default=50)
    barge_in.add_argument(
        "--from", dest="kept", type=Path, metavar="DIR", help="measure nothing: the figures of what --keep saved"
    )
    _common(barge_in, run_barge_in)
    uplink = kinds.add_parser("uplink", help="microphone to application, and what a lost packet costs")
    uplink.add_argument("--seconds", type=float, default=120.0)
    uplink.add_argument(
        "--loss",
        type=_percent,
        metavar="PERCENT",
        help="over a network that loses so many of 100 packets each way, and with --impaired is bad besides (root)",
    )
    _common(uplink, run_uplink)
    soak = kinds.add_parser("soak", help="minutes of talk and many visits: what is held afterwards")
    soak.add_argument("--minutes", type=float, default=10.0)
    soak.add_argument("--connects", type=int, default=50)
    soak.add_argument("--model", default="pocket", help="default: pocket")
    _output(soak, run_soak)
    memory = kinds.add_parser("memory", help="what the bookkeeping of memory costs, at many sizes")
    _output(memory, run_memory)
    scheduler = kinds.add_parser("scheduler", help="what deciding costs: a round of 1000 sessions, one launched step")
    _output(scheduler, run_scheduler)
    policies = kinds.add_parser("policies", help="scheduling policies on the same simulated people")
    policies.add_argument("--scenario", type=Path, default=Path("demos/scenarios/listeners.toml"), metavar="FILE")
    policies.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help='one of them, with options behind it ("interaction company=false"); default: all',
    )
    policies.add_argument("--seeds", type=int, default=5, help="how many of them; default: 5")
    policies.add_argument("--processes", type=int, default=2)
    policies.add_argument(
        "--grid",
        choices=("goals", "whole", "finer"),
        default="whole",
        help="loads: those that goals are about, all, or more where continuity is lost; default: whole",
    )
    instead = policies.add_mutually_exclusive_group()
    instead.add_argument("--sweep", action="store_true", help="the constants of interaction instead of the table")
    instead.add_argument("--ablations", action="store_true", help="interaction without each of its mechanisms")
    instead.add_argument(
        "--warm", action="store_true", help="turns whose memory was away (demos/scenarios/returning.toml)"
    )
    _output(policies, run_policies)
    costs = kinds.add_parser("costs", help="what the pocket model's stages cost here, as a calibration for simulate")
    costs.add_argument("--toml", type=Path, metavar="FILE", help="write the calibration")
    _output(costs, run_costs)
    face = kinds.add_parser("face", help="the face: lips, blinks, drift, costs; and in a browser")
    face.add_argument(
        "--drift-minutes", type=float, default=0.0, help="also an ablation of anchors over so long; 0: not"
    )
    face.add_argument("--drift-talking", action="store_true", help="that ablation in a conversation, not in silence")
    face.add_argument("--no-browser", action="store_true", help="not what Chromium shows of it: frames, lips, stops")
    _output(face, run_face)


def _percent(text: str) -> float:
    """A share of packets that some survive.

    Raises:  argparse.ArgumentTypeError outside [0, 100).
    """
    try:
        percent = float(text)
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage: at least 0 and less than 100")
    return percent


def _common(parser: argparse.ArgumentParser, act: Any) -> None:
    parser.add_argument(
        "--impaired", action="store_true", help="over a bad network: 40 ms, jitter 10, 3 %% loss (root)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep recordings and reports")
    _output(parser, act)


def _output(parser: argparse.ArgumentParser, act: Any) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(act=act)


def run_talk(options: argparse.Namespace) -> int:
    from duplexd.bench.stage import impairment_of
    from duplexd.bench.talk import bench, report_from

    if options.kept is not None:
        return _publish(report_from(options.kept), options.json)
    report = asyncio.run(
        bench(
            turns=options.turns,
            pauses=options.pauses,
            impairment=impairment_of(impaired=options.impaired, link_kbps=options.link),
            model=options.model,
            folder=options.keep,
            pairs=options.pairs,
            noise_db=None if options.no_noise else options.noise,
        )
    )
    return _publish(report, options.json)


def run_barge_in(options: argparse.Namespace) -> int:
    from duplexd.bench.bargein import bench, report_from

    if options.kept is not None:
        return _publish(report_from(options.kept), options.json)
    report = asyncio.run(bench(count=options.count, impaired=options.impaired, folder=options.keep))
    return _publish(report, options.json)


def run_uplink(options: argparse.Namespace) -> int:
    from duplexd.bench.stage import impairment_of
    from duplexd.bench.uplink import bench

    impairment = impairment_of(impaired=options.impaired, loss_percent=options.loss)
    report = asyncio.run(bench(seconds=options.seconds, impairment=impairment, folder=options.keep))
    return _publish(report, options.json)


def run_soak(options: argparse.Namespace) -> int:
    from duplexd.bench.soak import bench

    report = asyncio.run(bench(minutes=options.minutes, connects=options.connects, model=options.model))
    return _publish(report, options.json)


def run_memory(options: argparse.Namespace) -> int:
    from duplexd.bench.memory import bench

    return _publish(bench(), options.json)


def run_scheduler(options: argparse.Namespace) -> int:
    from duplexd.bench.scheduling import bench

    return _publish(bench(), options.json)


def run_policies(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from duplexd.bench import policies

    if options.sweep:
        report = policies.sweep(options.scenario, output=options.json, processes=options.processes)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        return _publish_sweep(report)
    if options.ablations:
        report = policies.ablations(options.scenario, output=options.json, processes=options.processes)
        return _publish_cells(report["ablations"], report, options.json)
    if options.warm:
        file, seeds = options.scenario.parent / "returning.toml", policies.seeds_of(options.seeds)
        report = policies.warm(file, output=options.json, seeds=seeds, processes=options.processes)
        cells = {name: {"": cell} for name, cell in report["warm"].items()}
        return _publish_cells({"returning": cells}, report, options.json)
    report = policies.bench(
        options.scenario,
        output=options.json,
        policies=options.policy,
        seeds=policies.seeds_of(options.seeds),
        processes=options.processes,
        grid=options.grid,
    )
    table = Table(*policies.HEADINGS)
    for row in policies.rows_of(report):
        table.add_row(*row)
    # Not folded where the output is no terminal: a table is read whole or not at all.
    Console(width=max(120, Console().width)).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _halves(percentiles: dict[str, float | None]) -> str:
    """P50 and P90 in one cell."""
    from duplexd.bench.policies import shown

    return "/".join(shown(percentiles[share], ".0f") for share in ("p50", "p90"))


def _publish_cells(scenarios: dict[str, Any], report: dict[str, Any], file: Path | None) -> int:
    """{scenario: {policy: {load: figures}}} as a table, and the report as JSON."""
    from rich.console import Console
    from rich.table import Table

    from duplexd.bench.policies import shown

    table = Table(
        *("scenario", "policy", "load", "ear ms p50/p90", "server ms p90", "first tokens, away", "continuity"),
        *("waste", "useful/s", "guessed in vain, s"),
    )
    for scenario, policies in scenarios.items():
        for policy, loads in policies.items():
            for load, cell in loads.items():
                table.add_row(
                    *(scenario, policy, load, _halves(cell["ttfp_ms"]), shown(cell["ttfp_server_ms"]["p90"], ".0f")),
                    *(_halves(cell["ttft_away_ms"]), shown(cell["continuity"], ".1%")),
                    *(shown(cell["waste"], ".1%"), shown(cell["useful_rps"], ".3f")),
                    shown(cell["guesses_dropped_s"]["render"], ".1f"),
                )
    Console(width=max(120, Console().width)).print(table)
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _publish_sweep(report: dict[str, Any]) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("constant", "load", "server ms p90", "continuity", "waste", "useful/s")
    for name, values in report["sweep"].items():
        for value, cells in values.items():
            for load, cell in cells.items():
                figures = (f"{cell['continuity']:.1%}", f"{cell['waste']:.1%}", f"{cell['useful_rps']:.3f}")
                table.add_row(f"{name}={value}", load, f"{cell['ttfp_server_ms']['p90']:.0f}", *figures)
    Console(width=max(100, Console().width)).print(table)
    return 0


def run_costs(options: argparse.Namespace) -> int:
    from duplexd.bench import costs

    report = costs.bench()
    if options.toml is not None:
        options.toml.write_text(costs.toml_of(report))
    return _publish(report, options.json)


def run_face(options: argparse.Namespace) -> int:
    from importlib.metadata import entry_points

    from duplexd.bench import recordings
    from duplexd.bench.face import UNSEEN
    from duplexd.bench.face import bench as seen

    # By entry point: nothing imports models.
    (examination,) = entry_points(group="duplexd.benches", name="face")
    people = [recording.audio() for recording in recordings.load("reader")]
    report = UNSEEN if options.no_browser else asyncio.run(seen())
    examined = examination.load()(
        drift_minutes=options.drift_minutes, drift_talking=options.drift_talking, people=people
    )
    return _publish(examined | report, options.json)


def _publish(report: dict[str, Any], file: Path | None) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", show_header=False)
    for name, value in report.items():
        if name not in ("each", "each_without", "paused", "metrics"):
            table.add_row(name, json.dumps(value) if not isinstance(value, str) else value)
    Console(soft_wrap=True).print(table)
    if file is not None:
        file.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0
