"""The peers' own scenario runner, unmodified: `omni-duplex-eval generate` of one sample. Prints one JSON.

Arguments: URL, seconds (unused), the package's folder, the sample's sound, its video, a reference voice, a folder for
what it makes. It streams units of one second with a frame of the video on each, commits, and waits for the reply.
"""

import asyncio
import json
import sys
import types

URL, _, ROOT, SOUND, VIDEO, REFERENCE, MADE = sys.argv[1:8]


def hollow(name, folder):
    """A package of the peers' without what its `__init__` would import of their engine."""
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


hollow("vllm_omni", ROOT)
hollow("vllm_omni.benchmarks", f"{ROOT}/benchmarks")
hollow("vllm_omni.experimental", f"{ROOT}/experimental")
hollow("vllm_omni.experimental.fullduplex", f"{ROOT}/experimental/fullduplex")
hollow("vllm_omni.metrics", f"{ROOT}/metrics")
from vllm_omni.benchmarks.duplex.omni_duplex_eval_clock import validate_clock  # noqa: E402
from vllm_omni.benchmarks.duplex.omni_duplex_eval_dataset import DuplexSample  # noqa: E402
from vllm_omni.benchmarks.duplex.omni_duplex_eval_runner import generate_sample  # noqa: E402

row = {"id": "one", "split": "RTD_counting", "video": VIDEO, "question_audio": SOUND, "question": "How many?"}
options = {"url": f"{URL}/v1/realtime", "model": "clock", "ref_audio": REFERENCE, "output_root": MADE}
result = asyncio.run(generate_sample(DuplexSample.from_row(row), **options))
meta = json.loads(result.output.with_name("one.meta.json").read_text())
validate_clock(meta)
sentences = json.loads(result.output.read_text())
metrics = {"requests": result.request_metrics, "session": result.session_metrics}
print(json.dumps({"meta": meta, "sentences": sentences, **metrics}))
