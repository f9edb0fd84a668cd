"""`octavo doctor`: what this machine offers, which kernels run, whether their bits and their text are right.

Four checks, each of which can fail:
- rows: a token's hidden state has the same bits alone and in a step of any size, and chunked or not;
- text: each token of a short greedy answer is (nearly) the first choice of the exact reference, which is float32
  torch operations on exactly dequantised weights;
- perplexity: the weight format in use costs at most one per cent of perplexity on a fixed text;
- books: the KV books close after it.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo import hardware
from octavo._version import __version__
from octavo.config import EngineConfig

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64)
CHUNK_TOKENS = 48
PROMPT = "The four seasons of the year are spring,"
ANSWER_TOKENS = 24
PERPLEXITY_TOKENS = 1024
MAX_PERPLEXITY_CHANGE = 0.01
MAX_LOGIT_SHORTFALL = 1.0  # how far a chosen token may be below the reference's best, in logits


@dataclass
class Check:
    name: str
    passed: bool
    detail: str


@dataclass
class Report:
    """Everything a bug report asks for. No prompts, no paths of the user's but the cache folder."""

    version: str
    machine: dict[str, Any]
    software: dict[str, Any]
    environment: dict[str, str]
    engine: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


def examine(config: EngineConfig, progress: Callable[[str], None], *, model: bool = True) -> Report:
    """Look at the machine and, unless `model` is false, run the checks on `config.model`."""
    report = Report(__version__, machine(), software(), _environment())
    if model:
        progress("loading the model")
        _check_model(config, report, progress)
    return report


def machine() -> dict[str, Any]:
    interesting = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": hardware.cpu_model(),
        "instruction_sets": sorted(f for f in hardware.cpu_flags() if f.startswith(interesting)),
        "cpus_allowed": len(hardware.allowed_cpus()),
        "physical_cores": hardware.physical_cores(),
        "cpu_quota_cores": hardware.cpu_quota_cores(),
        "memory_available_bytes": hardware.available_memory_bytes(),
    }


def software() -> dict[str, Any]:
    import numpy
    import torch

    from octavo.ops import native_lib

    usable = native_lib.library() is not None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "numpy": numpy.__version__,
        "native_operations": native_lib.choose_isa() if usable else "not built (torch operations serve)",
        "native_paths": list(native_lib.available_isas()) if usable else [],
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def _environment() -> dict[str, str]:
    """Names that change what happens; a key is never shown."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT")
    shown = {n: v for n, v in os.environ.items() if n in names or n.startswith("OCTAVO_")}
    return {n: "(set)" if "KEY" in n or "TOKEN" in n else v for n, v in sorted(shown.items())}


def _check_model(config: EngineConfig, report: Report, progress: Callable[[str], None]) -> None:
    from octavo import LLM, SamplingParams
    from octavo.bench.workload import source_text

    given = {name: getattr(config, name) for name, opt in EngineConfig.options().items() if name != "model"}
    with LLM(config.model, **given) as llm:
        report.engine = list(llm.startup_lines())
        progress("rows: the same bits in steps of every size")
        report.checks.append(check_rows(llm.core.runner.network, config.page_size))
        progress("text: a short answer against the exact reference")
        reference = _reference(config)
        ids = list(llm.tokenizer.encode(PROMPT))
        result = llm.generate([ids], SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True))[0]
        report.checks.append(check_text(reference, config.page_size, ids, list(result.token_ids)))
        progress("perplexity: the weight format against the exact reference")
        text_ids = list(llm.tokenizer.encode(source_text()))[:PERPLEXITY_TOKENS]
        report.checks.append(check_perplexity(llm.core.runner.network, reference, config.page_size, text_ids))
    report.checks.append(Check("books", True, "every page came back"))  # close() raises where they do not


def check_rows(network: Any, page_size: int) -> Check:
    """Bits of hidden states and of logits: alone, in company, chunked."""
    import torch

    from octavo.bench.scratch import chunk_step, decode_step, scratch_pages

    count = max(ROW_COUNTS)
    ids = [(7919 * i + 11) % network.config.vocab_size for i in range(count)]
    different: list[str] = []
    with torch.inference_mode():
        kv = scratch_pages(network, count, CHUNK_TOKENS, page_size)
        alone = torch.cat([network.forward(decode_step([token]), kv)[0] for token in ids])
        logits = torch.cat([network.logits(row[None]) for row in alone[:4]])
        for rows in ROW_COUNTS:
            hidden, _ = network.forward(decode_step(ids[:rows]), kv)
            if not torch.equal(hidden, alone[:rows]):
                different.append(f"{rows} rows")
            if not torch.equal(network.logits(hidden)[:4], logits[:rows]):
                different.append(f"head over {rows} rows")
        whole, _ = network.forward(chunk_step(ids[:CHUNK_TOKENS]), kv)
        for size in (1, 5, 16):
            pieces = [
                network.forward(chunk_step(ids[at : min(at + size, CHUNK_TOKENS)], start=at), kv)[0]
                for at in range(0, CHUNK_TOKENS, size)
            ]
            if not torch.equal(torch.cat(pieces), whole):
                different.append(f"chunks of {size}")
    detail = f"differs: {', '.join(different)}" if different else f"equal over {', '.join(map(str, ROW_COUNTS))} rows"
    return Check("rows", not different, detail)


def _reference(config: EngineConfig) -> Any:
    """The same model in float32 torch operations on exactly dequantised weights."""
    from octavo.bench.perplexity import network_of
    from octavo.model.load import load_model

    loaded = load_model(config.model, cache_dir=config.cache_dir, accept_license=config.accept_license)
    return network_of(loaded, "exact", config.page_size)


def check_text(reference: Any, page_size: int, prompt_ids: list[int], answer_ids: list[int]) -> Check:
    """Score the answer with the exact reference in one forward: is each token its first choice, or close to it?"""
    import torch

    from octavo.bench.scratch import chunk_step, scratch_pages

    ids = [*prompt_ids, *answer_ids]
    with torch.inference_mode():
        hidden, _ = reference.forward(chunk_step(ids), scratch_pages(reference, 1, len(ids), page_size))
        logits = reference.logits(hidden[len(prompt_ids) - 1 : -1])
    chosen = logits.gather(1, torch.tensor(answer_ids)[:, None])[:, 0]
    shortfall = logits.max(dim=1).values - chosen
    first = int((shortfall == 0).sum())
    worst = float(shortfall.max())
    detail = f"{first} of {len(answer_ids)} tokens are the reference's first choice; the worst is {worst:.3f} below it"
    return Check("text", worst <= MAX_LOGIT_SHORTFALL, detail)


def check_perplexity(network: Any, reference: Any, page_size: int, ids: list[int]) -> Check:
    """What the weight format costs on a fixed text."""
    from octavo.bench.perplexity import score

    values = []
    for each in (network, reference):
        nll, tokens = score(each, ids, page_size, lambda done, total: None)
        values.append(math.exp(nll / tokens))
    change = values[0] / values[1] - 1
    detail = f"{values[0]:.4f} over {len(ids)} tokens, {change:+.2%} against exact dequantisation ({network.formats})"
    return Check("perplexity", change <= MAX_PERPLEXITY_CHANGE, detail)
