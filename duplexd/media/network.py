"""Networks that ONNX Runtime runs: the voice detector, the ears, the judge of turns."""

from __future__ import annotations

from pathlib import Path

import onnxruntime

from duplexd.errors import WeightsError


def load_network(model: Path, *, called: str, threads: int = 1) -> onnxruntime.InferenceSession:
    """A network on the CPU, stateless, so that all sessions of a process share one.

    Waiting threads sleep: spinning ones would take the cores that the other stages compute on. The log stays empty,
    since what fails is raised.

    Args:    called: what the error calls it, as in "the turn judge".
    Raises:  WeightsError when the file is missing or damaged.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as fault:
        raise WeightsError(f"{called} {model} cannot be loaded: {fault}; run `duplexd fetch`") from fault
